"""Groups of the settings in the help, and the check of a user's code."""

from __future__ import annotations

from cyclopts import Group, Parameter
from pydantic import AfterValidator

from accounting.core.validation import check_choice
from trainer.model.user_code import check_name

TRAINING = Parameter(group=Group("Training", sort_key=3))
MODEL = Parameter(group=Group("Model and loss", sort_key=4))
AVERAGES = Parameter(
    group=Group("Averages of the iterates, at no further cost", sort_key=5)
)


def code(name: str, *names: str) -> AfterValidator:
    """Returns the check of a setting that is ``module:function``.

    Args:
      name: Name of the setting.
      *names: Names that are accepted, too.
    """

    def check(value: str | None) -> str | None:
        if value is not None and (":" in value or not names):
            check_name(value, name)
        elif value is not None:
            check_choice(name, value, (*names, "module:function"))
        return value

    return AfterValidator(check)
