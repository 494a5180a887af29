#!/bin/sh
# Images: a small CNN with group normalisation, trained on four views of each image, of
# which the mean loss is clipped (image_model.py).
set -eu
python -m make_data images --rows "${ROWS:-20000}"

dpsgd batches --input images/train --out images-batches --batch-size 256 --epochs 4
dpsgd train --batches images-batches --eval images/test --out images-run \
    --model image_model:cnn --loss sparse_categorical_crossentropy \
    --views 4 --augment image_model:moved \
    --epsilon 3 --delta 1e-6
dpsgd report images-run --out images.html
