"""Architectures that users bring: those of public examples, built anew and small.

Images, text and series are here; tables, heads and odd layers in
``table_architectures``.  ``ARCHITECTURES`` has all of them, and what the check of each
decides.  Sources: keras.io/examples, and the examples of
Opacus and of TF Privacy.
"""

from __future__ import annotations

from typing import Any

from tests.trainer.architecture import (
    SPARSE,
    SQUARES,
    Architectures,
    ids,
    one_hot,
    real,
    registers,
)
from tests.trainer.table_architectures import OF_TABLES
from trainer.core.tf_compat import keras, tf
from trainer.gradients.paths import SINGLE_EXAMPLES

layers, ops = keras.layers, keras.ops

_FOUND: Architectures = {}
architecture = registers(_FOUND)

#: A small image, and a sentence of ids of which 0 is padding.
IMAGE = real(6, 6, 2)
WORDS = ids(7, 3)


def _conv(filters: int, size: int = 3, **more: Any) -> Any:
    return layers.Conv2D(filters, size, **{"padding": "same", **more})


def _pooled(values: Any, units: int = 3) -> Any:
    return layers.Dense(units)(layers.GlobalAveragePooling2D()(values))


# -- images ----------------------------------------------------------------------------


@architecture(
    image=IMAGE, label=one_hot(3), loss=keras.losses.CategoricalCrossentropy()
)
def mnist_convnet(image: Any) -> Any:
    values = layers.MaxPooling2D()(layers.Conv2D(3, 3, activation="relu")(image))
    values = layers.Dropout(0.5)(layers.Flatten()(values))
    return layers.Dense(3, activation="softmax")(values)


@architecture(image=IMAGE, label=ids(3), loss=SPARSE)
def tf_privacy_mnist(image: Any) -> Any:
    values = _conv(4, 4, strides=2, activation="relu")(image)
    values = layers.MaxPooling2D(2, 1)(values)
    return layers.Dense(3)(layers.Dense(4, activation="relu")(layers.Flatten()(values)))


@architecture(image=IMAGE, label=ids(3), loss=SPARSE)
def opacus_cifar(image: Any) -> Any:
    values = layers.AveragePooling2D(2)(_conv(3, activation="relu")(image))
    return _pooled(layers.Activation("relu")(_conv(4)(values)))


@architecture(image=IMAGE, label=ids(3), loss=SPARSE)
def resnet(image: Any) -> Any:
    values = _conv(4)(image)
    inner = layers.GroupNormalization(2)(_conv(4, strides=2)(values))
    inner = layers.LayerNormalization()(_conv(4)(ops.relu(inner)))
    return _pooled(ops.relu(_conv(4, 1, strides=2)(values) + inner))


@architecture(image=IMAGE, label=ids(3), loss=SPARSE)
def mobile_blocks(image: Any) -> Any:
    values = _conv(4, 1, activation="relu6")(image)
    values = layers.DepthwiseConv2D(3, padding="same", activation="relu6")(values)
    values = layers.Add()([image, _conv(2, 1)(values)])
    return _pooled(layers.SeparableConv2D(3, 3, activation="hard_swish")(values))


@architecture(image=IMAGE, label=ids(3), loss=SPARSE)
def squeeze_and_excite(image: Any) -> Any:
    values = _conv(4, activation="relu")(image)
    gate = layers.GlobalAveragePooling2D(keepdims=True)(values)
    gate = _conv(4, 1, activation="sigmoid")(_conv(2, 1, activation="relu")(gate))
    return _pooled(values * gate)


@architecture(image=IMAGE, label=ids(3), loss=SPARSE)
def conv_mixer(image: Any) -> Any:
    values = layers.Activation("gelu")(_conv(4, 2, strides=2)(image))
    mixed = layers.DepthwiseConv2D(3, padding="same", activation="gelu")(values)
    values = layers.Add()([layers.LayerNormalization()(mixed), values])
    return _pooled(_conv(4, 1, activation="gelu")(values))


def _patches(image: Any, units: int = 4) -> Any:
    """Vectors of the nine patches of 2 by 2."""
    cut = ops.image.extract_patches(image, (2, 2))
    return layers.Dense(units)(ops.reshape(cut, (-1, 9, 8)))


@architecture(image=IMAGE, label=ids(3), loss=SPARSE)
def mlp_mixer(image: Any) -> Any:
    values = _patches(image)
    turned = ops.transpose(layers.LayerNormalization()(values), (0, 2, 1))
    turned = layers.Dense(9)(layers.Dense(5, activation="gelu")(turned))
    values = values + ops.transpose(turned, (0, 2, 1))
    inner = layers.Dense(6, activation="gelu")(layers.LayerNormalization()(values))
    values = values + layers.Dense(4)(inner)
    return layers.Dense(3)(layers.GlobalAveragePooling1D()(values))


class _Places(layers.Layer):
    """Adds a trained vector to each place."""

    def build(self, shape: Any) -> None:
        self.places = layers.Embedding(shape[1], shape[2])
        self.places.build(None)

    def call(self, values: Any, mask: Any = None) -> Any:
        return values + self.places(ops.arange(values.shape[1]))


def _block(values: Any, dropout: float = 0.0, **attended: Any) -> Any:
    """A block of a transformer."""
    attention = layers.MultiHeadAttention(2, 2, dropout=dropout)
    values = layers.Add()([values, attention(values, values, **attended)])
    values = layers.LayerNormalization()(values)
    inner = layers.Dense(4)(layers.Dense(5, activation="relu")(values))
    inner = layers.Dropout(dropout)(inner)
    return layers.LayerNormalization()(layers.Add()([values, inner]))


@architecture(image=IMAGE, label=ids(3), loss=SPARSE)
def vision_transformer(image: Any) -> Any:
    values = _block(_Places()(_patches(image)), 0.1)
    return layers.Dense(3)(layers.Flatten()(values))


@architecture(SINGLE_EXAMPLES, image=IMAGE, label=ids(3, 6, 6), loss=SPARSE)
def u_net(image: Any) -> Any:
    down = _conv(3, activation="relu")(image)
    values = _conv(4, strides=2, activation="relu")(down)
    values = layers.Concatenate()([layers.UpSampling2D(2)(values), down])
    return _conv(3, 1)(values)


@architecture(SINGLE_EXAMPLES, image=IMAGE, label=real(6, 6, 2), loss=SQUARES)
def conv_autoencoder(image: Any) -> Any:
    values = layers.MaxPooling2D(2, padding="same")(_conv(3, activation="relu")(image))
    values = layers.Conv2DTranspose(3, 3, strides=2, padding="same")(values)
    return _conv(2, activation="sigmoid")(values)


@architecture(clip=real(2, 3, 3, 1), label=real(3, 3, 1), loss=SQUARES)
def next_frame(clip: Any) -> Any:
    values = layers.ConvLSTM2D(2, 2, padding="same")(clip)
    return layers.Conv2D(1, 3, padding="same")(values)


@architecture(first=IMAGE, second=IMAGE)
def siamese(first: Any, second: Any) -> Any:
    tower = keras.Sequential(
        [_conv(2, activation="tanh"), layers.Flatten(), layers.Dense(3)]
    )
    gap = tower(first) - tower(second)
    distance = ops.sqrt(ops.sum(gap * gap, 1, keepdims=True) + 1e-3)
    return layers.Dense(1)(distance)


def _triplet_loss(_: Any, outputs: Any) -> Any:
    anchor, near, far = ops.split(outputs, 3, 1)
    gaps = [ops.sum(ops.square(anchor - other), 1) for other in (near, far)]
    return ops.maximum(gaps[0] - gaps[1] + 0.5, 0.0)


@architecture(anchor=real(5), near=real(5), far=real(5), loss=_triplet_loss)
def triplets(anchor: Any, near: Any, far: Any) -> Any:
    tower = keras.Sequential(
        [layers.Dense(4, "tanh"), layers.Dense(3), layers.UnitNormalization()]
    )
    return ops.concatenate([tower(anchor), tower(near), tower(far)], 1)


class _CosineHead(layers.Layer):
    """Cosines with a vector of each class, as in ArcFace."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight((shape[-1], 3))

    def call(self, values: Any) -> Any:
        return 4.0 * ops.matmul(
            ops.normalize(values, -1), ops.normalize(self.kernel, 0)
        )


@architecture(SINGLE_EXAMPLES, image=IMAGE, label=ids(3), loss=SPARSE)
def cosine_head(image: Any) -> Any:
    return _CosineHead()(layers.Dense(4)(layers.Flatten()(image)))


# -- text ------------------------------------------------------------------------------


@architecture(words=WORDS)
def text_transformer(words: Any) -> Any:
    values = _block(_Places()(layers.Embedding(7, 4)(words)), 0.1)
    values = layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(values))
    return layers.Dense(1)(layers.Dense(3, activation="relu")(values))


@architecture(words=WORDS)
def padded_transformer(words: Any) -> Any:
    values = layers.Embedding(7, 4, mask_zero=True)(words)
    values = values + layers.MultiHeadAttention(2, 2)(values, values)
    mask = ops.cast(words > 0, "float32")[..., None]
    return layers.Dense(1)(ops.sum(values * mask, 1))


@architecture(words=WORDS)
def bidirectional_lstm(words: Any) -> Any:
    values = layers.Embedding(7, 3)(words)
    return layers.Dense(1)(layers.Bidirectional(layers.LSTM(2))(values))


@architecture(words=WORDS, label=ids(3), loss=SPARSE)
def opacus_char_lstm(words: Any) -> Any:
    values = layers.Embedding(7, 3, mask_zero=True)(words)
    return layers.Dense(3)(layers.LSTM(3)(values))


@architecture(words=WORDS)
def opacus_imdb(words: Any) -> Any:
    values = layers.GlobalAveragePooling1D()(layers.Embedding(7, 3)(words))
    return layers.Dense(1)(layers.Dense(3, activation="relu")(values))


@architecture(words=WORDS)
def bag_of_words(words: Any) -> Any:
    values = layers.Embedding(7, 3, mask_zero=True)(words)
    return layers.Dense(1)(layers.GlobalAveragePooling1D()(values))


@architecture(words=ids(7, 8))
def text_convolutions(words: Any) -> Any:
    values = layers.Dropout(0.5)(layers.Embedding(7, 3)(words))
    values = layers.Conv1D(3, 3, strides=2, activation="relu")(values)
    return layers.Dense(1)(layers.GlobalMaxPooling1D()(values))


def _of_tokens(labels: Any, logits: Any) -> Any:
    """The mean over the tokens of a row that are no padding, whose label is 0."""
    losses = keras.losses.sparse_categorical_crossentropy(labels, logits, True)
    kept = ops.cast(ops.cast(labels, "int32") > 0, "float32")
    return ops.sum(losses * kept, -1) / ops.maximum(ops.sum(kept, -1), 1.0)


@architecture(SINGLE_EXAMPLES, words=WORDS, label=ids(3, 3), loss=_of_tokens)
def ner_tagger(words: Any) -> Any:
    values = layers.Conv1D(3, 2, padding="same")(layers.Embedding(7, 4)(words))
    return layers.Dense(3)(values)


@architecture(SINGLE_EXAMPLES, words=WORDS, label=ids(3, 3), loss=SPARSE)
def recurrent_tagger(words: Any) -> Any:
    values = layers.Embedding(7, 3, mask_zero=True)(words)
    values = layers.GRU(3, return_sequences=True)(values)
    return layers.TimeDistributed(layers.Dense(3))(values)


@architecture(SINGLE_EXAMPLES, words=WORDS, label=ids(7, 3), loss=SPARSE)
def tf_privacy_language_model(words: Any) -> Any:
    values = layers.LSTM(3, return_sequences=True)(layers.Embedding(7, 3)(words))
    return layers.Dense(7)(values)


@architecture(SINGLE_EXAMPLES, words=WORDS, label=ids(7, 3), loss=SPARSE)
def tied_language_model(words: Any) -> Any:
    table = layers.Embedding(7, 4)
    values = _block(_Places()(table(words)), use_causal_mask=True)
    return ops.matmul(values, ops.transpose(table.embeddings))


@architecture(SINGLE_EXAMPLES, words=WORDS, said=WORDS, label=ids(7, 3), loss=SPARSE)
def sequence_to_sequence(words: Any, said: Any) -> Any:
    _, *state = layers.LSTM(3, return_state=True)(layers.Embedding(7, 3)(words))
    decoder = layers.LSTM(3, return_sequences=True)
    return layers.Dense(7)(decoder(layers.Embedding(7, 3)(said), initial_state=state))


@architecture(SINGLE_EXAMPLES, words=WORDS, said=WORDS, label=ids(7, 3), loss=SPARSE)
def translation(words: Any, said: Any) -> Any:
    source = layers.Embedding(7, 4, mask_zero=True)(words)
    values = layers.Embedding(7, 4, mask_zero=True)(said)
    return layers.Dense(7)(values + layers.MultiHeadAttention(2, 2)(values, source))


@architecture(words=WORDS)
def mixture_of_experts(words: Any) -> Any:
    values = layers.Embedding(7, 4)(words)
    gates = layers.Dense(3, activation="softmax")(values)
    experts = ops.stack([layers.Dense(4, "relu")(values) for _ in range(3)], 2)
    values += ops.einsum("bte,bted->btd", gates, experts)
    return layers.Dense(1)(layers.GlobalAveragePooling1D()(values))


@architecture(SINGLE_EXAMPLES, words=WORDS)
def f_net(words: Any) -> Any:
    values = layers.Embedding(7, 4)(words)
    mixed, _ = ops.fft2((values, ops.zeros_like(values)))
    values = layers.LayerNormalization()(values + mixed)
    return layers.Dense(1)(layers.GlobalAveragePooling1D()(values))


@architecture(words=WORDS)
def llama_block(words: Any) -> Any:
    values = layers.Embedding(7, 4)(words)
    normed = layers.RMSNormalization()(values)
    values += layers.GroupQueryAttention(2, 2, 1)(normed, normed, use_causal_mask=True)
    normed = layers.RMSNormalization()(values)
    gate = layers.Dense(5, activation="silu", use_bias=False)(normed)
    values += layers.Dense(4)(gate * layers.Dense(5, use_bias=False)(normed))
    return layers.Dense(1)(values[:, -1])


# -- series ----------------------------------------------------------------------------

SERIES = real(3, 2)


@architecture(series=SERIES, label=real(1), loss=SQUARES)
def stacked_gru(series: Any) -> Any:
    values = layers.GRU(3, return_sequences=True)(series)
    return layers.Dense(1)(layers.GRU(2, reset_after=True)(values))


@architecture(series=SERIES, label=ids(3), loss=SPARSE)
def series_transformer(series: Any) -> Any:
    normed = layers.LayerNormalization()(series)
    values = series + layers.MultiHeadAttention(2, 2)(normed, normed)
    inner = layers.Conv1D(4, 1, activation="relu")(layers.LayerNormalization()(values))
    values = values + layers.Conv1D(2, 1)(inner)
    pooled = layers.GlobalAveragePooling1D(data_format="channels_first")(values)
    return layers.Dense(3)(layers.Dense(4, "relu")(pooled))


@architecture(series=SERIES, label=ids(3), loss=SPARSE)
def series_convolutions(series: Any) -> Any:
    values = layers.Conv1D(4, 3, padding="same")(series)
    values = layers.PReLU(shared_axes=[1])(layers.GroupNormalization(2)(values))
    return layers.Dense(3)(layers.GlobalAveragePooling1D()(values))


@architecture(SINGLE_EXAMPLES, series=SERIES, label=real(3, 1), loss=SQUARES)
def wavenet(series: Any) -> Any:
    values = layers.Conv1D(3, 1)(series)
    causal = {"padding": "causal", "dilation_rate": 2}
    gate = layers.Conv1D(3, 2, activation="sigmoid", **causal)(values)
    gate = gate * layers.Conv1D(3, 2, activation="tanh", **causal)(values)
    return layers.Conv1D(1, 1)(values + layers.Conv1D(3, 1)(gate))


@architecture(speeds=real(3, 3, 1), label=real(3), loss=SQUARES)
def traffic_forecasting(speeds: Any) -> Any:
    """Nodes by steps: a convolution over the graph, then a recurrence of each node."""
    neighbours = tf.constant([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    nodes = ops.einsum("nm,bmtk->bntk", neighbours, speeds)
    nodes = ops.concatenate([speeds, nodes], -1)
    steps = ops.reshape(layers.Dense(2, "relu")(nodes), (-1, 3, 2))
    return ops.reshape(layers.Dense(1)(layers.LSTM(2)(steps)), (-1, 3))


ARCHITECTURES: Architectures = {**_FOUND, **OF_TABLES}
