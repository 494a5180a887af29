#!/bin/sh
# Which team answers a message: three classes, from words.
set -eu
python -m make_data tickets --rows "${ROWS:-20000}"  # in place of your own CSV

dpsgd schema tickets.csv --out tickets.toml --label team \
    --classes billing,delivery,account --category channel --text message
dpsgd prepare --input tickets.csv --schema tickets.toml --out tickets
dpsgd batches --input tickets/train --out tickets-batches --batch-size 256 --epochs 8
dpsgd train --batches tickets-batches --eval tickets/test --out tickets-run \
    --epsilon 3 --delta 1e-6
dpsgd report tickets-run --out tickets.html
