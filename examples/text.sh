#!/bin/sh
# Text: a small Transformer (text_model.py), which sees that "not great" is not great.
set -eu
python -m make_data reviews --rows "${ROWS:-20000}"

dpsgd prepare --input reviews.csv --schema reviews.toml --out reviews
dpsgd batches --input reviews/train --out reviews-batches --batch-size 256 --epochs 4
dpsgd train --batches reviews-batches --eval reviews/test --out reviews-run \
    --model text_model:transformer --epsilon 3 --delta 1e-6
dpsgd report reviews-run --out reviews.html
