"""The checkpoint codec: every state comes back exactly, through real JSON and real safetensors, or is refused."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import math
import pathlib
import random
import re
import struct
import tracemalloc
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from paceline import plain_state
from paceline.errors import CheckpointError
from paceline.plain_state import Unreadable, decode, decode_saved, encode, read
from paceline.state.snapshot import on_host

Point = collections.namedtuple("Point", "x y")
NAN_WITH_PAYLOAD = struct.unpack("<d", bytes.fromhex("efbeadde0000f87f"))[0]


def roundtrip(value: Any) -> Any:
    """Through the text of a JSON file and the bytes of a safetensors file, as a checkpoint goes."""
    document, tensors = encode(value)
    text, data = json.dumps(document, allow_nan=False), save(on_host(tensors), {"format": "pt"})
    return read(text.encode(), load(data))


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in logical order, of any dtype."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).tolist()) if plain.numel() else b""


def in_order(value: Any) -> str:
    """A text to sort by. The repr of a set is none: equal sets may list their elements in another order."""
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__} {sorted(map(in_order, value))}"
    if isinstance(value, tuple):
        return f"tuple {[in_order(item) for item in value]}"
    return repr(value)


def assert_same(a: Any, b: Any) -> None:
    """Equal in type, order and every bit: unlike ==, it tells 1 from True and from 1.0, 0.0 from -0.0, NaN from NaN."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))
    elif isinstance(a, (np.ndarray, np.generic)):
        assert (a.dtype.str, a.shape, a.tobytes()) == (b.dtype.str, b.shape, b.tobytes())
    elif isinstance(a, float):
        assert struct.pack("<d", a) == struct.pack("<d", b)
    elif isinstance(a, complex):
        assert struct.pack("<dd", a.real, a.imag) == struct.pack("<dd", b.real, b.imag)
    elif isinstance(a, dict):
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        assert_same(list(a), list(b))
        assert_same(list(a.values()), list(b.values()))
    elif isinstance(a, (list, tuple, deque)):
        assert len(a) == len(b)
        assert getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        for one, other in zip(a, b):
            assert_same(one, other)
    elif isinstance(a, (set, frozenset)):
        assert_same(sorted(a, key=in_order), sorted(b, key=in_order))
    else:
        assert a == b


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            False,
            0,
            -1,
            2**63 - 1,
            -(2**63),
            2**63,
            -(2**200),
            10**6000,
            "",
            "é\0\n",
            "\ud800",
            b"",
            b"\0\xff",
        ),
        *(0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, float("inf"), -float("inf"), float("nan"), NAN_WITH_PAYLOAD),
        *(1j, complex(float("nan"), -0.0), bytearray(b"ab"), [], (), {}, set(), frozenset(), deque(), deque([1, 2], 3)),
        *([1, (2, [3, ()])], {"b": 1, "a": 2}, {0: "int", "0": "str", (1, "x"): None, None: 1.5, 2.5: b""}),
        *(
            {"$": "tuple", "items": []},
            {"$": {"$": 1}},
            {True: 1},
            {frozenset([1, (2, 3)]): {4}},
            {1, "1", (1,), 1.5, b"1"},
        ),
        *(
            OrderedDict([("b", 1), ("a", 2)]),
            Counter({80: 1, 30: 2}),
            defaultdict(list, {1: [2]}),
            defaultdict(None, {}),
        ),
        *(torch.float8_e4m3fn, torch.device("cuda", 1), torch.device("cpu"), torch.Size([2, 0]), {torch.float32: 1}),
        *(
            np.float64(0.1),
            np.float32("nan"),
            np.int8(-3),
            np.bool_(True),
            np.complex64(1j),
            np.datetime64("2024-01-01"),
        ),
        *(
            np.str_("né"),
            np.bytes_(b""),
            np.float16(1.5),
            np.array(3.0),
            np.zeros((0, 3), np.int16),
            np.array(["a", "bcd"]),
        ),
        *(np.arange(6).reshape(2, 3).T, np.arange(5)[::-2], np.arange(3, dtype=">i4"), np.array([1, 2], np.uint32)),
        *(
            np.array([1.5], np.longdouble),
            np.array([True]),
            np.array([1j]),
            np.array([], "U"),
            np.asfortranarray(np.eye(2)),
        ),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_values_come_back_exactly(value: Any) -> None:
    assert_same(roundtrip(value), value)
    assert_same(roundtrip({"nested": [value, (value,)]}), {"nested": [value, (value,)]})


# Quantized values need a scale, and neither `bits` nor integers of less than a byte can be made from numbers.
NO_NUMBERS = re.compile(r"torch\.(q.*|bits.*|u?int[1-7]|float4.*)")
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
DTYPES = [dtype for dtype in DTYPES if not NO_NUMBERS.fullmatch(str(dtype))]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    value = raw.view(dtype).reshape(2, 3)
    for shaped in (value, value[0, 0], value[:0], value[1:, ::2], value.t(), value[0:1].expand(4, 3)):
        assert_same(roundtrip(shaped), shaped)


def test_memory_order_comes_back_so_that_later_steps_take_the_same_kernels() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    permuted = torch.randn(3, 4, 5).to(torch.complex64).permute(2, 0, 1)
    again = roundtrip([image, permuted])
    assert [one.stride() for one in again] == [image.stride(), permuted.stride()]
    assert_same(again, [image, permuted])
    assert roundtrip(torch.randn(4, 6)[:, ::2]).is_contiguous(), "gaps in memory are not worth keeping"


def test_lazy_views_are_saved_as_what_they_show() -> None:
    value = torch.randn(3, dtype=torch.complex128)
    for view in (value.conj(), value.conj().imag, value.real):
        assert_same(roundtrip(view), view.clone())
    assert value.conj().is_conj(), "this torch has no lazy views: the test tests nothing"
    assert value.conj().imag.is_neg()


def test_a_parameter_comes_back_as_a_plain_tensor() -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    again = roundtrip(parameter)
    assert type(again) is torch.Tensor
    assert not again.requires_grad
    assert torch.equal(again, parameter)


def test_encoding_copies_no_plain_tensor() -> None:
    value = torch.randn(5)
    _, tensors = encode({"x": value})
    assert tensors["x"].data_ptr() == value.data_ptr()


def test_a_model_keeps_its_names_and_its_versions() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = model.state_dict()
    _, tensors = encode(state)
    assert list(tensors) == list(state)
    assert roundtrip(state)._metadata == state._metadata  # type: ignore[attr-defined]


def test_names_that_collide_or_that_safetensors_cannot_hold_are_kept_apart() -> None:
    one, two, three, four = (torch.full((), float(number)) for number in range(4))
    state = {"__metadata__": one, "a": {0: two, "0": three}, "a/0": four, "\ud800": one}
    assert_same(roundtrip(state), state)


def test_ties_are_saved_whole_and_come_back_apart() -> None:
    weight = torch.randn(4, 4)
    again = roundtrip({"in": weight, "out": weight, "row": weight[1], "none": weight[2:2]})
    assert_same([again["in"], again["out"], again["row"]], [weight, weight, weight[1]])
    again["in"].zero_()
    assert torch.equal(again["out"], weight)


def test_equal_states_give_equal_documents() -> None:
    forwards, backwards = {0, 8}, {8, 0}
    assert list(forwards) != list(backwards), "these sets have one order: the test tests nothing"
    assert json.dumps(encode(forwards)[0]) == json.dumps(encode(backwards)[0])


def test_random_states_continue_their_streams() -> None:
    numpy_generator = np.random.default_rng(3)
    states = roundtrip(
        {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "generator": numpy_generator.bit_generator.state,
            "torch": torch.get_rng_state(),
        }
    )
    expected = random.random(), np.random.rand(), numpy_generator.random(), torch.rand(1).item()
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    numpy_generator.bit_generator.state = states["generator"]
    torch.set_rng_state(states["torch"])
    assert (random.random(), np.random.rand(), numpy_generator.random(), torch.rand(1).item()) == expected


@pytest.mark.parametrize("kind", ["SGD", "Adam", "Adafactor", "LBFGS", "RMSprop"])
def test_training_goes_on_from_a_decoded_state_with_the_same_bits(kind: str) -> None:
    def make() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        options = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4])

    def train(objects: tuple[Any, ...], steps: range) -> None:
        model, optimizer, schedule = objects
        for step in steps:
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
            schedule.step()

    straight, first, second = make(), make(), make()
    train(straight, range(6))
    train(first, range(3))
    for old, new in zip(first, second):
        new.load_state_dict(roundtrip(old.state_dict()))
    train(second, range(3, 6))
    assert_same(straight[0].state_dict(), second[0].state_dict())
    assert_same(straight[2].state_dict(), second[2].state_dict())


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Record:
    x: int


class Words(dict):  # type: ignore[type-arg]
    pass


class Marked(torch.Tensor):
    pass


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to drop them
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def looped() -> list[Any]:
    outer: list[Any] = [1]
    outer.append({"inner": outer})
    return outer


def deep() -> Any:
    value: Any = 0
    for _ in range(3000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "what", "remedy"),
    [
        (lambda x: x, "a function", "create it again"),
        (print, "a function", "create it again"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear", "state_dict()"),
        (torch.nn.Linear, "a class (Linear)", "name"),
        (Point(1, 2), "a namedtuple", "_asdict()"),
        (Colour.RED, "an enum member", ".value"),
        (Record(1), "a dataclass", "asdict(value)"),
        (Words(), "a subclass of dict", "dict(value)"),
        (pathlib.PureWindowsPath("a"), "Path", "str(value)"),
        (torch.Generator(), "Generator", "get_state()"),
        (object(), "a object", "Use its parts"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo", "to_dense()"),
        (torch.empty(2, device="meta"), "meta device", "to_empty"),
        (quantized(), "quantized", "dequantize()"),
        (torch.ones(2).as_subclass(Marked), "subclass of Tensor", "as_subclass"),
        ({torch.ones(1): 1}, "a tensor as a dict key", "index"),
        ({torch.ones(1)}, "a tensor as a dict key or set member", "index"),
        (defaultdict(lambda: 0), "defaultdict with a function as factory", "list"),
        (np.array([object()]), "numpy array of dtype object", "tolist()"),
        (np.ma.masked_array([1]), "MaskedArray", "Use its parts"),
        (looped(), "contains itself", "cycle"),
        (deep(), "nested 100 levels deep", "Flatten"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_plain_form_is_refused_by_place_with_the_remedy(value: Any, what: str, remedy: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        encode({"decay": {"schedule": [0, value]}}, "tracked 'ema'")
    assert str(caught.value).startswith("tracked 'ema' at decay.schedule[1]"), caught.value
    assert what in str(caught.value)
    assert remedy in str(caught.value)


def test_the_whole_message() -> None:
    with pytest.raises(CheckpointError) as caught:
        encode({"decay": {"a schedule": len}}, "tracked 'ema'")
    assert str(caught.value) == (
        "tracked 'ema' at decay['a schedule']: a function cannot be saved. "
        "Use the numbers and names it is made from, and create it again after loading."
    )


@pytest.mark.parametrize(
    "document",
    [
        *({"$": "pickle"}, {"$": "tensor", "name": "absent"}, {"$": "torch.dtype", "name": "load"}, {"$": ["x"]}),
        *(
            {"$": "numpy", "name": "x", "dtype": "O", "shape": [1]},
            {"$": "numpy.scalar", "dtype": "O", "hex": "00" * 8},
        ),
        *({"$": "set", "items": [[]]}, {"$": "tuple"}, {"$": "defaultdict", "default": "eval", "items": []}),
        *({"$": "tensor", "name": "x", "dtype": "float64", "shape": [5]}, {"$": "float", "hex": "zz"}),
    ],
    ids=json.dumps,
)
def test_a_document_from_elsewhere_is_an_error_and_runs_nothing(document: Any) -> None:
    with pytest.raises(Unreadable):
        decode({"a": [document]}, {"x": torch.zeros(2)})
    with pytest.raises(Unreadable):
        read(json.dumps({"a": [document]}).encode(), {"x": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"m\.json cannot be read back"):
        decode_saved({"a": [document]}, {"x": torch.zeros(2)}, "m.json")


def peak_bytes(reader: Callable[[bytes], Any], data: bytes) -> int:
    tracemalloc.start()
    kept = reader(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(kept["a"]) == 20_000
    return peak


def test_a_document_of_small_lists_takes_no_more_memory_than_the_lists() -> None:
    """Python's own reader of the same bytes is the measure: there is no second tree."""
    data = b'{"a": [' + b",".join([b"[[], {}]"] * 20_000) + b"]}"
    assert peak_bytes(lambda data: read(data, {}), data) < 1.1 * peak_bytes(json.loads, data)


def test_a_document_of_too_many_lists_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_state, "MOST_BRACKETS", 1000)
    for text in ("[" + "[]," * 1000 + "1]", "[" + '{"a":1},' * 1000 + "1]", "[" * 1001):
        with pytest.raises(Unreadable, match="1,001 lists and dicts"):
            read(text.encode(), {})
    quoted = {"text": '[{"\\' * 2000, 'other "[': ["\\"] * 900}
    assert read(json.dumps(quoted).encode(), {}) == quoted


@pytest.mark.parametrize(
    "value",
    [
        [[] for _ in range(1000)],
        [{"a": 1} for _ in range(1000)],
        dict.fromkeys(range(1000), 0),
        [(n,) for n in range(500)],
        [math.inf] * 1000,
        [torch.zeros(2, dtype=torch.complex64) for _ in range(1000)],
    ],
)
def test_what_could_not_be_read_is_not_saved(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    document, tensors = encode({"half": value[: len(value) // 3] if isinstance(value, list) else {1: 0}})
    text = json.dumps(document)
    monkeypatch.setattr(plain_state, "MOST_BRACKETS", 1000)
    read(text.encode(), tensors)
    with pytest.raises(CheckpointError, match=r"more than 1,000 lists, dict entries.*Store them in tensors"):
        encode(value)


hashables = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
tensors = st.builds(
    lambda dtype, shape, seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex128, torch.int32, torch.bool]),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 9),
)
arrays = st.builds(
    lambda dtype, shape: np.arange(int(np.prod(shape))).reshape(shape).astype(dtype),
    st.sampled_from(["f8", ">f4", "u2", "?", "c8", "m8[s]"]),
    st.lists(st.integers(0, 3), max_size=3),
)
trees = st.recursive(
    hashables | tensors | arrays,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.dictionaries(st.sampled_from(["$", "items", "name", "0", 0]), inner, max_size=4).map(OrderedDict)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, 5))
        | st.sets(hashables, max_size=3)
    ),
    max_leaves=20,
)


@given(tree=trees)
@settings(max_examples=300, deadline=None)
def test_any_tree_comes_back_exactly(tree: Any) -> None:
    assert_same(roundtrip(tree), tree)
