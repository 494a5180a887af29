#!/bin/sh
# Recommendation: a tower for users and one for films (two_towers.py).  The privacy unit
# is one rating; a user with k of them is protected as a group of k.
set -eu
python -m make_data ratings --rows "${ROWS:-40000}"

dpsgd prepare --input ratings.csv --schema ratings.toml --out ratings
dpsgd batches --input ratings/train --out ratings-batches --batch-size 1024 --epochs 20
dpsgd train --batches ratings-batches --eval ratings/test --out ratings-run \
    --model two_towers:towers --epsilon 3 --delta 1e-6
dpsgd report ratings-run --out ratings.html
