"""tf.distribute's own training loop. python examples/migrate/tf_distribute_before.py --devices 2

Needs tensorflow or tensorflow-cpu, which can have an environment of its own, and NumPy and scikit-learn.
"""

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from dense import digits, first_weights


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=30, help="of each replica")
    parser.add_argument("--devices", type=int, default=2, help="parts of the CPU, where there is no GPU")
    parser.add_argument("--out", default="model.npz")
    args = parser.parse_args()
    if not tf.config.list_physical_devices("GPU"):
        parts = [tf.config.LogicalDeviceConfiguration()] * args.devices
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
    dtype = keras.config.floatx()

    strategy = tf.distribute.MirroredStrategy(
        tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU"),
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
    global_batch = args.batch * strategy.num_replicas_in_sync
    train_set, (images, labels) = digits(dtype)
    dataset = tf.data.Dataset.from_tensor_slices(train_set).shuffle(1500).batch(global_batch)
    distributed = strategy.experimental_distribute_dataset(dataset)

    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "silu"), keras.layers.Dense(10)])
        model.set_weights(first_weights(dtype))
        optimizer = keras.optimizers.SGD(0.125, momentum=0.875)
        optimizer.build(model.trainable_variables)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=global_batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    @tf.function
    def train_step(batch: Any) -> Any:
        losses = strategy.run(replica_step, args=batch)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    for epoch in range(args.epochs):
        for batch in distributed:
            train_step(batch)
        right = np.argmax(model(images), 1) == labels
        print(f"epoch {epoch + 1} test accuracy {right.mean():.4f}")
    np.savez(args.out, *model.get_weights())


if __name__ == "__main__":
    main()
