"""The process of tf.distribute's MirroredStrategy, on logical CPU devices. Its Python has neither torch nor Paceline.

Each model is reimplemented with TensorFlow operations on the weights that measure.py has written. The losses of the
first steps show that the networks are the same. MobileNetV2 comes from benchmarks/mobilenet_tensorflow.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.suite.talk import Step, serve

Weights = dict[str, Any]  # torch's names -> variables, in torch's shapes


def dense(tf: Any, x: Any, w: Weights, name: str) -> Any:
    x = tf.linalg.matmul(x, w[f"{name}.weight"], transpose_b=True)
    return x + w[f"{name}.bias"] if f"{name}.bias" in w else x


def mlp(tf: Any, x: Any, w: Weights) -> Any:
    for number in (0, 2, 4, 6):
        x = tf.nn.relu(dense(tf, x, w, str(number)))
    return dense(tf, x, w, "8")


def layers(tf: Any, x: Any, w: Weights) -> Any:
    for number in range(300):
        x = x + 0.02 * tf.nn.relu(dense(tf, x, w, f"layers.{number}"))
    return dense(tf, x, w, "head")


def conv(tf: Any, x: Any, w: Weights) -> Any:
    for number in (0, 3, 6):
        x = tf.nn.conv2d(x, tf.transpose(w[f"{number}.weight"], (2, 3, 1, 0)), 1, "SAME") + w[f"{number}.bias"]
        x = tf.nn.max_pool2d(tf.nn.relu(x), 2, 2, "VALID")
    return dense(tf, tf.reduce_mean(x, (1, 2)), w, "11")


def conv_bn(tf: Any, x: Any, w: Weights) -> Any:
    """Batch norm over the examples of all replicas, without running statistics, since no loss depends on them."""
    context = tf.distribute.get_replica_context()
    for number in (0, 4, 8):
        x = tf.nn.conv2d(x, tf.transpose(w[f"{number}.weight"], (2, 3, 1, 0)), 1, "SAME")
        moments = tf.stack([tf.reduce_mean(x, (0, 1, 2)), tf.reduce_mean(tf.square(x), (0, 1, 2))])
        mean, square = tf.unstack(context.all_reduce(tf.distribute.ReduceOp.MEAN, moments))
        x = tf.nn.batch_normalization(
            x, mean, square - tf.square(mean), w[f"{number + 1}.bias"], w[f"{number + 1}.weight"], 1e-5
        )
        x = tf.nn.max_pool2d(tf.nn.relu(x), 2, 2, "VALID")
    return dense(tf, tf.reduce_mean(x, (1, 2)), w, "14")


def gpt(tf: Any, x: Any, w: Weights) -> Any:
    def norm(x: Any, name: str) -> Any:
        mean, variance = tf.nn.moments(x, -1, keepdims=True)
        return tf.nn.batch_normalization(x, mean, variance, w[f"{name}.bias"], w[f"{name}.weight"], 1e-5)

    length, width = x.shape[1], w["tokens.weight"].shape[1]
    mask = tf.constant(np.triu(np.full((length, length), -1e9, np.float32), 1))
    x = tf.gather(w["tokens.weight"], x) + w["positions.weight"][:length]
    for number in range(4):
        name = f"blocks.{number}"
        qkv = dense(tf, norm(x, f"{name}.norm_1"), w, f"{name}.qkv")
        qkv = tf.reshape(qkv, (-1, length, 3, width // 32, 32))  # heads of 32
        q, k, v = tf.unstack(tf.transpose(qkv, (2, 0, 3, 1, 4)))
        seen = tf.nn.softmax(tf.linalg.matmul(q, k, transpose_b=True) / 32**0.5 + mask)
        attended = tf.reshape(tf.transpose(tf.linalg.matmul(seen, v), (0, 2, 1, 3)), (-1, length, width))
        x = x + dense(tf, attended, w, f"{name}.out")
        inner = tf.nn.gelu(dense(tf, norm(x, f"{name}.norm_2"), w, f"{name}.up"), approximate=False)
        x = x + dense(tf, inner, w, f"{name}.down")
    return tf.linalg.matmul(norm(x, "norm"), w["tokens.weight"], transpose_b=True)


NETWORKS: dict[str, Callable[..., Any]] = {
    "mlp": mlp,
    "layers": layers,
    "conv": conv,
    "conv_bn": conv_bn,
    "gpt": gpt,
}


def mobilenet(weights: dict[str, Any]) -> Any:
    """Keras's model, with these initial weights."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mobilenet_tensorflow import keras_network

    groups = (1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)
    first = []
    for name, value in weights.items():
        if value.ndim == 4:  # (outputs, inputs / groups, h, w)
            depthwise = value.shape[1] == 1 and value.shape[2] > 1
            first.append(value.transpose((2, 3, 0, 1) if depthwise else (2, 3, 1, 0)))
        elif value.ndim == 2:
            first += [value.T, weights[name.replace("weight", "bias")]]
    return keras_network(groups, 0.25, first)


def prepare(job: dict[str, Any]) -> tuple[Step, Callable[[], int]]:
    import keras
    import tensorflow as tf

    devices = job["devices"]
    tf.config.threading.set_intra_op_parallelism_threads(job["threads"])
    tf.config.threading.set_inter_op_parallelism_threads(max(devices, job["threads"]))
    parts = [tf.config.LogicalDeviceConfiguration()] * devices
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
    strategy = tf.distribute.MirroredStrategy(
        tf.config.list_logical_devices("CPU"), cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    folder = Path(job["folder"])
    data, first = np.load(folder / "data.npz"), dict(np.load(folder / "weights.npz"))
    inputs, targets = data["inputs"], data["targets"]
    if inputs.ndim == 4:
        inputs = inputs.transpose(0, 2, 3, 1)
    batches = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(job["batch"]).repeat().prefetch(2)
    batches = iter(strategy.experimental_distribute_dataset(batches))
    with strategy.scope():
        if job["model"] == "mobilenet":
            network = mobilenet(first)
            weights, forward = network.trainable_variables, lambda x: network(x, training=True)
        else:
            named = {name: tf.Variable(value) for name, value in first.items()}
            weights, forward = list(named.values()), lambda x: NETWORKS[job["model"]](tf, x, named)
        if job["optimizer"] == "adam":
            optimizer = keras.optimizers.Adam(1e-4, epsilon=1e-8)
        else:
            optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer.build(weights)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, forward(x))
            loss = tf.reduce_mean(losses) / devices  # all replicas have equal numbers of examples
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica_step, args=(x, y)), axis=None)

    return lambda: train_step(*next(batches)), lambda: 0


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    serve(0, prepare)
    os._exit(0)
