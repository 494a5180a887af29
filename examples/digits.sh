#!/bin/sh
# Written digits: DP-SGD, BAM and DP-SAT at one epsilon, by a CNN and a small transformer.
# The images are real, and public: scikit-learn ships them (pip install scikit-learn).
set -eu
python -m make_data digits --rows "${ROWS:-1797}"

for model in image:standardized_cnn vision_transformer:vit; do
    dpsgd compare --input digits/train --eval digits/test \
        --out "digits-${model#*:}" --sampler truncated-poisson --metric accuracy \
        --method dp-sgd --method bam --method dp-sat \
        --for bam "--bam-radius 0.02" --for dp-sat "--sat-radius 0.05" \
        --model "models.$model" --loss sparse_categorical_crossentropy \
        --optimizer nadam --learning-rate 0.005 --l2-norm-clip 1 \
        --batch-size 256 --epochs "${EPOCHS:-5}" --epsilon 2 --delta 1e-4 \
        --seeds "${SEEDS:-3}"
done
