#!/bin/sh
# A table in the manner of the Adult census: two classes.  From CSV to a report.
set -eu
python -m make_data census --rows "${ROWS:-20000}"  # in place of your own CSV

dpsgd prepare --input census.csv --schema census.toml --out census
dpsgd batches --input census/train --out census-batches --batch-size 256 --epochs 8
dpsgd train --batches census-batches --eval census/test --out census-run \
    --epsilon 3 --delta 1e-6
dpsgd report census-run --out census.html
