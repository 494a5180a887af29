"""JSON of another format or version, or with other fields, is refused."""

import pytest

from accounting.core.validation import InputError, header, read_fields

OTHER_THAN_GOOD = [
    ([], "a thing to be a JSON object"),
    (None, "a thing to be a JSON object"),
    ({}, 'a thing with format="f"'),
    ({"format": "g", "version": 3, "a": 1, "b": 2}, 'a thing with format="f"'),
    ({"format": "f", "version": 2, "a": 1, "b": 2}, "thing version=2 to be 3. Mend it"),
    ({"format": "f", "a": 1, "b": 2}, "thing version=None to be 3. Mend it"),
    ({"format": "f", "version": 3, "a": 1}, "wrong or missing: b"),
    ({"format": "f", "version": 3, "a": 1, "c": 1}, "wrong or missing: b, c"),
]


def read(value, **changes):
    arguments = {"kind": "thing", "version": 3, "format_name": "f", "remedy": "Mend it"}
    return read_fields(value, ["a", "b"], **{**arguments, **changes})


def test_what_was_written_is_read():
    assert read({**header(3, "f"), "b": 2, "a": None}) == {"a": None, "b": 2}
    assert read({**header(3), "b": 2, "a": 1}, format_name=None) == {"a": 1, "b": 2}


@pytest.mark.parametrize(("value", "message"), OTHER_THAN_GOOD)
def test_anything_else_is_refused(value, message):
    with pytest.raises(InputError) as error:
        read(value)
    assert message in str(error.value)
