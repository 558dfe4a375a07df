"""MobileNetV2 on CIFAR-10 under Paceline and under TensorFlow's MirroredStrategy, on this machine's CPU.

    PACELINE_TENSORFLOW=/path/to/python python benchmarks/mobilenet_tensorflow.py --data cifar10.zip

PACELINE_TENSORFLOW names a Python with tensorflow or tensorflow-cpu, which are not dependencies. Both sides have the
same network, initial weights, images, Adam, cosine schedule and global batch, and batch norm over the global batch.
Each side crops, mirrors and shuffles images with its random generators. Four runs alternate: Paceline on one and two
processes with one thread each, and MirroredStrategy on one and two logical CPU devices with the same total number of
threads. A run's seconds are the median of its epochs, without evaluation, and without the first epoch since TensorFlow
traces then. Its CPU seconds are those of all its processes from their start, with imports, tracing and evaluation. If
other programs use the machine, wall seconds mean little; the load shows the mean number of runnable programs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mobilenet_tensorflow.json"
WIDTH, EPSILON = 0.25, 1e-5
EPOCH = re.compile(r"epoch \d+/\d+  loss \S+  ([\d.]+) (ms|s)\b")


# --- TensorFlow's side: runs in its Python, without torch and Paceline


def keras_network(groups: Any, width: float, first: list[Any]) -> Any:
    """The network of examples/cifar10_mobilenetv2.py, with these initial weights in the order of its layers."""
    import keras
    from keras import layers

    def channels(count: int) -> int:
        return max(8, int(count * width + 4) // 8 * 8)

    def convolution(
        x: Any, outputs: int, size: int, stride: int = 1, depthwise: bool = False, last: bool = False
    ) -> Any:
        x = layers.ZeroPadding2D(size // 2)(x) if size > 1 else x  # on both sides alike, as PyTorch pads
        if depthwise:
            x = layers.DepthwiseConv2D(size, stride, use_bias=False)(x)
        else:
            x = layers.Conv2D(outputs, size, stride, use_bias=False)(x)
        x = layers.BatchNormalization(momentum=0.9, epsilon=EPSILON, synchronized=True)(x)
        return x if last else layers.ReLU(6.0)(x)

    start = keras.Input((32, 32, 3))
    inputs = channels(32)
    x = convolution(start, inputs, 3)
    for expansion, outputs, blocks, stride in groups:
        for block in range(blocks):
            own = stride if block == 0 else 1
            inner, before = inputs * expansion, x
            x = convolution(x, inner, 1) if expansion > 1 else x
            x = convolution(convolution(x, inner, 3, own, depthwise=True), channels(outputs), 1, last=True)
            x = layers.Add()([before, x]) if own == 1 and inputs == channels(outputs) else x
            inputs = channels(outputs)
    x = layers.GlobalAveragePooling2D()(convolution(x, channels(1280) if width > 1 else 1280, 1))
    model = keras.Model(start, layers.Dense(10)(x))
    kernels = [
        layer for layer in model.layers if isinstance(layer, (layers.Conv2D, layers.DepthwiseConv2D, layers.Dense))
    ]
    for layer in kernels:
        layer.set_weights([first.pop(0) for _ in layer.get_weights()])
    assert not first, f"{len(first)} first weights are left over"
    return model


def under_tensorflow(folder: Path) -> None:
    import keras
    import tensorflow as tf

    job = json.loads((folder / "job.json").read_text())
    tf.config.threading.set_intra_op_parallelism_threads(job["devices"])
    tf.config.threading.set_inter_op_parallelism_threads(job["devices"])
    parts = [tf.config.LogicalDeviceConfiguration()] * job["devices"]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
    strategy = tf.distribute.MirroredStrategy(
        tf.config.list_logical_devices("CPU"), cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    data, weights = np.load(folder / "data.npz"), np.load(folder / "weights.npz")
    mean, deviation = data["mean"], data["deviation"]

    def prepared(image: Any, label: Any) -> Any:
        image = (tf.cast(image, tf.float32) / 255 - mean) / deviation
        image = tf.image.random_crop(tf.pad(image, [[4, 4], [4, 4], [0, 0]]), (32, 32, 3))
        return tf.image.random_flip_left_right(image), label

    count, batch = len(data["train_labels"]), job["batch"]
    train = tf.data.Dataset.from_tensor_slices((data["train_images"], data["train_labels"])).shuffle(count)
    train = strategy.experimental_distribute_dataset(train.map(prepared).batch(batch))
    steps = job["epochs"] * -(-count // batch)
    with strategy.scope():
        model = keras_network(job["groups"], job["width"], [weights[name] for name in weights.files])
        optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(job["lr"], steps), epsilon=1e-8)
        optimizer.build(model.trainable_variables)

    def replica_step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                labels, model(images, training=True), from_logits=True
            )
            size = tf.cast(tf.shape(labels)[0], tf.float32)
            whole = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, size)
            loss = tf.reduce_sum(losses) / whole
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    @tf.function
    def train_step(images: Any, labels: Any) -> Any:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica_step, args=(images, labels)), axis=None)

    test = ((data["test_images"] / 255 - mean) / deviation).astype(np.float32)
    seconds = []
    for _ in range(job["epochs"]):
        began = time.perf_counter()
        for images, labels in train:
            loss = train_step(images, labels)
        float(loss)
        seconds.append(time.perf_counter() - began)
    right = np.argmax(model.predict(test, batch_size=128, verbose=0), 1) == data["test_labels"]
    print(json.dumps({"accuracy": float(right.mean()), "seconds": seconds, "tensorflow": tf.__version__}))


# --- Paceline's side


def first_weights(width: float) -> list[np.ndarray[Any, Any]]:
    """The initial weights of a run with seed 0 on Paceline's side, in the order of layers, in Keras's shapes."""
    import torch
    from cifar10_mobilenetv2 import mobilenet_v2

    import paceline

    run = paceline.start(seed=0, progress="off", device="cpu")
    found = []
    for module in mobilenet_v2(width).modules():
        if isinstance(module, torch.nn.Conv2d):  # (outputs, inputs / groups, h, w)
            order = (2, 3, 0, 1) if module.groups > 1 else (2, 3, 1, 0)
            found.append(module.weight.detach().permute(order).numpy())
        elif isinstance(module, torch.nn.Linear):
            found += [module.weight.detach().T.numpy(), module.bias.detach().numpy()]
    run.close()
    return found


def under_paceline(processes: int, options: argparse.Namespace) -> tuple[float, list[float]]:
    """Test accuracy, and the seconds of each epoch."""
    command = [sys.executable, "-m", "paceline", "run", "--nproc", str(processes)]
    command += [str(ROOT / "examples" / "cifar10_mobilenetv2.py"), "--data", str(options.data), "--optimizer", "adam"]
    for name, value in given(options).items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    scores = re.findall(r"val_accuracy ([\d.]+)", done.stderr + done.stdout)
    if done.returncode or not scores:
        raise SystemExit(f"Paceline on {processes} processes failed:\n{done.stdout}{done.stderr}")
    seconds = [float(n) * (1e-3 if unit == "ms" else 1) for n, unit in EPOCH.findall(done.stderr + done.stdout)]
    return float(scores[-1]), seconds


def cpu_seconds() -> float:
    """CPU seconds of all finished child processes, including their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def given(options: argparse.Namespace) -> dict[str, Any]:
    return {"limit": options.limit, "epochs": options.epochs, "global-batch": options.global_batch, "lr": options.lr,
            "width": WIDTH}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="cifar-10-python.tar.gz, or cifar10.zip")
    parser.add_argument("--limit", type=int, default=1600, help="training images, and a fifth as many test images")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tensorflow", type=Path, help=argparse.SUPPRESS)  # this process is TensorFlow's side
    options = parser.parse_args()
    if options.tensorflow:
        under_tensorflow(options.tensorflow)
        return
    python = os.environ.get("PACELINE_TENSORFLOW")
    if python is None:
        parser.error("PACELINE_TENSORFLOW is not set: let it name a Python that has tensorflow or tensorflow-cpu")
    if options.data is None or options.epochs < 2:
        parser.error("--data FILE and at least 2 --epochs are needed")
    sys.path.insert(0, str(ROOT / "examples"))
    from cifar10_data import DEVIATION, MEAN, load
    from cifar10_mobilenetv2 import GROUPS

    train, test = load(options.data, options.limit)
    found: dict[str, dict[str, Any]] = {}
    version = ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arrays = {f"{part}_images": data.images.numpy() for part, data in (("train", train), ("test", test))}
        arrays |= {f"{part}_labels": data.labels.numpy() for part, data in (("train", train), ("test", test))}
        np.savez(folder / "data.npz", mean=MEAN.numpy(), deviation=DEVIATION.numpy(), **arrays)
        np.savez(folder / "weights.npz", *first_weights(WIDTH))
        for turn in range(options.rounds):
            for size in (1, 2):
                for side in ("Paceline", "MirroredStrategy")[:: 1 if turn % 2 == 0 else -1]:
                    used = cpu_seconds()
                    if side == "Paceline":
                        accuracy, seconds = under_paceline(size, options)
                    else:
                        job = {"devices": size, "batch": options.global_batch, "epochs": options.epochs}
                        job |= {"lr": options.lr, "width": WIDTH, "groups": GROUPS}
                        (folder / "job.json").write_text(json.dumps(job))
                        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
                        command = [python, __file__, "--tensorflow", str(folder)]
                        done = subprocess.run(command, env=environment, capture_output=True, text=True)
                        if done.returncode:
                            raise SystemExit(f"TensorFlow on {size} devices failed:\n{done.stdout}{done.stderr}")
                        said = json.loads(done.stdout.splitlines()[-1])
                        accuracy, seconds, version = said["accuracy"], said["seconds"], said["tensorflow"]
                    names = "accuracy", "epoch_seconds", "cpu_seconds", "load_over_5_minutes"
                    row = found.setdefault(f"{side}, {size}", {name: [] for name in names})
                    row["accuracy"].append(accuracy)
                    row["cpu_seconds"].append(round(cpu_seconds() - used, 1))
                    row["load_over_5_minutes"].append(round(os.getloadavg()[1], 1))
                    row["epoch_seconds"].append([round(value, 3) for value in seconds])
                    later = [value for own in row["epoch_seconds"] for value in own[1:]]
                    row["median_seconds"] = statistics.median(later)
                    row["lowest_seconds"], row["highest_seconds"] = min(later), max(later)
                    print(turn, side, size, accuracy, seconds, flush=True)
                    write(options, found, version)  # save the results so far, in case a later run hangs


def write(options: argparse.Namespace, found: dict[str, dict[str, Any]], version: str) -> None:
    from collate_draws import machine

    settings = {name: value for name, value in given(options).items() if name != "width"} | {"rounds": options.rounds}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    result = {
        "command": shlex.join(["python", "benchmarks/mobilenet_tensorflow.py", "--data", "cifar10.zip", *words]),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine() | {"tensorflow": version, "note": "other programs computed at the same time"},
        "settings": {**given(options), "rounds": options.rounds},
        "runs": found,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
