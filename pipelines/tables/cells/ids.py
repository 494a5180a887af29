"""The one text of a user's id, wherever a command meets it.

``prepare`` splits and bounds by it, and ``bound`` hashes it.  A person whose ids were
two texts would be two users, and would keep twice as many rows as epsilon says; two
people of one text keep fewer rows, and are hidden as a pair.  So what may be one id in
two forms is one.

Formal guarantees, beside those of ``values``:
  - Texts that Unicode holds to be compatible (NFKC) are one, without the white space
    around them: 7 is also 7.0, with a no-break space, and in digits of full width.
  - No id is missing, and none is a number of which floating point has lost digits.

Sensitive: ids.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.inputs.type_kinds import is_text
from pipelines.tables.cells.cells import Cells, nulls
from pipelines.tables.cells.values import rounded_texts, texts_of


def ids_of(cells: Cells) -> pa.Array:
    """Returns ids as large strings; what is no id is a fault of ``cells``.

    Args:
      cells: Numbers, texts, or bytes that are texts.
    """
    if is_text(cells.array.type):
        cells = cells.of(_compatible(cells.array))
    texts, bad = texts_of(cells)
    cells.fault(bad | nulls(texts), "is missing, or no whole number or text")
    cells.fault(
        rounded_texts(cells),
        "is a number that floating point rounds; write ids as integers or texts",
    )
    return texts


def _compatible(texts: pa.Array) -> pa.Array:
    is_ascii: np.ndarray = pc.string_is_ascii(texts)
    if pc.all(is_ascii).as_py() is not False:
        return texts
    return pc.utf8_trim_whitespace(pc.utf8_normalize(texts, form="NFKC"))
