#!/bin/sh
# Clicks of people with many rows each: an epsilon for all rows of one.
set -eu
k="${K:-10}"
rows="${ROWS:-125000}"  # made up; in place of your own table with a column of users
dpsgd synth --rows "$rows" --rows-per-user 10 --out users-data

slots="${SLOTS:-$((rows * 13 / 25))}"  # a public number: more rows than are kept
dpsgd prepare --input users-data --schema criteo --user user --out users-rows \
    --max-examples-per-user "$k" --num-examples "$slots"
dpsgd batches --input users-rows/train --out users-rows-batches \
    --batch-size "$((slots / 64))" --epochs 2
# Few steps and much noise: a small clip ranks better than the default here.
dpsgd train --batches users-rows-batches --eval users-rows/test \
    --out users-rows-run --epsilon 3 --delta 1e-6 \
    --optimizer momentum --l2-norm-clip 3 --embedding-dim 4 --hidden 32
dpsgd account users-rows-run
