#!/bin/sh
# Rows or users?  One epsilon for users, twice: steps draw rows, or users.
set -eu
k="${K:-10}"
rows="${ROWS:-125000}"  # made up; in place of your own table with a column of users
dpsgd synth --rows "$rows" --rows-per-user 10 --out users-data

for sampled in rows users; do
    # Public numbers: more rows than are kept, and as many users as train: four fifths.
    slots=$((rows * 8 / 100))
    if [ "$sampled" = rows ]; then slots="${SLOTS:-$((rows * 13 / 25))}"; fi
    dpsgd prepare --input users-data --schema criteo --user user --out "users-$sampled" \
        --max-examples-per-user "$k" --sample "$sampled" --num-examples "$slots"
    dpsgd batches --input "users-$sampled/train" --out "users-$sampled-batches" \
        --batch-size "$((slots / 64))" --epochs 2
    # Few steps and much noise: a small clip ranks better than the default here.
    dpsgd train --batches "users-$sampled-batches" --eval "users-$sampled/test" \
        --out "users-$sampled-run" --epsilon 3 --delta 1e-6 \
        --optimizer momentum --l2-norm-clip 3 --embedding-dim 4 --hidden 32
done
dpsgd account users-rows-run
dpsgd account users-users-run
