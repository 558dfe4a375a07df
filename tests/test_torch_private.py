"""Every private name of torch that Paceline uses is there, and does what Paceline uses it for.

A new version of torch is looked at here first: what fails says which name, and the test what is needed of it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.errors import TorchVersionError
from paceline.torch_private import core, dynamic_rendezvous, elastic, flight_recorder, observed, support

# ------------------------------------------------------------ what is said of a missing name


@pytest.mark.parametrize("lacking", ["from torch.nn import _Absent", "torch.nn._Absent"])
def test_a_missing_name_is_an_error_with_version_and_remedy(lacking: str) -> None:
    with pytest.raises(TorchVersionError) as told, support.needed_for("strategy so"):
        exec(lacking)
    for part in (f"torch {torch.__version__}", "strategy so", "_Absent", f'pip install "torch~={support.NEWEST}.0"'):
        assert part in str(told.value)


def test_the_core_imports_nothing_that_torch_has_not() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import paceline.torch_private.core; "
        "print(*(name for name in set(sys.modules) - before if name.startswith('torch')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert not done.stdout.strip()


def test_the_oldest_version_is_what_the_package_asks_for() -> None:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'"torch>={support.OLDEST}"' in project


# ------------------------------------------------------------ tensors


def test_how_many_hold_a_tensor() -> None:
    x = torch.zeros(2)
    alone = core.use_count(x)
    kept = torch.autograd.graph.save_on_cpu  # any name of Python's: it does not count
    assert (alone, kept) == (1, torch.autograd.graph.save_on_cpu)
    graph = (x.requires_grad_() * torch.ones(2)).sum()
    assert core.use_count(x) > 1
    del graph


class Traced(Tensor):
    """A tensor of a class of ours, which counts the functions that torch asks it about."""

    asked = 0

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Traced:
        return core.make_wrapper_subclass(cls, shape, dtype=torch.float32)  # type: ignore[no-any-return]

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Traced.asked += 1
        with core.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def test_a_class_of_tensors_has_a_shape_and_no_memory_and_is_asked() -> None:
    x = Traced((2, 3))
    Traced.asked = 0
    assert (tuple(x.shape), Traced.asked) == ((2, 3), 1)
    with core.DisableTorchFunctionSubclass():
        assert tuple(x.shape) == (2, 3)
    with core.DisableTorchFunction():
        assert tuple(x.shape) == (2, 3)
    assert Traced.asked == 1


def test_no_function_mode_is_asked_where_all_are_off() -> None:
    class Counting(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.seen += 1
            return func(*args, **(kwargs or {}))

    with Counting() as mode:
        assert core.current_function_mode() is mode
        torch.zeros(1)
        seen = Counting.seen
        with core.DisableTorchFunction():
            torch.zeros(1)
        assert seen == Counting.seen > 0
    assert core.current_function_mode() is None


def test_hooks_of_tensors() -> None:
    p = nn.Parameter(torch.ones(1))
    assert [getattr(p, name) for name in core.TENSOR_HOOKS] == [None, None]
    p.register_hook(lambda grad: grad * 2)
    p.register_post_accumulate_grad_hook(lambda _: None)
    assert [len(getattr(p, name)) for name in core.TENSOR_HOOKS] == [1, 1]
    assert (len(core.backward_hooks(p)), len(core.accumulated_hooks(p))) == (1, 1)
    other = nn.Parameter(torch.ones(1))
    setattr(other, core.TENSOR_HOOKS[0], getattr(p, core.TENSOR_HOOKS[0]))
    other.sum().backward()
    assert other.grad is not None
    assert other.grad.item() == 2.0, "a hook of the one acts on the other"


# ------------------------------------------------------------ autograd and operators


def test_a_backward_tells_which_nodes_it_will_come_to() -> None:
    used, unused = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in (used, unused)]
    loss, told = (used * 2).sum(), []
    loss.register_hook(lambda _: told.append([core.will_execute(node) for node in nodes]))
    loss.backward()
    assert told == [[True, False]]


def test_nodes_are_numbered_as_they_are_made() -> None:
    x = torch.ones(1, requires_grad=True)
    first = core.next_node()
    y = x * 2
    between = core.next_node()
    z = y * 2
    assert core.node_number(y.grad_fn) == first < between == core.node_number(z.grad_fn)


def test_a_node_knows_the_shape_of_its_outputs() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    parts = (x * 2).split([1, 2], 1)
    assert [core.output_shape(parts[0].grad_fn, place) for place in (0, 1)] == [(2, 1), (2, 2)]
    assert core.output_shape(x.sum().grad_fn, 0) == ()
    assert core.saved_factor_shape((x * 2).grad_fn) == ()
    assert core.saved_factor_shape((x * torch.ones(3)).grad_fn) == (3,)
    assert core.saved_factor_shape((x / 2).grad_fn) == ()
    assert core.saved_factor_shape(x.exp().grad_fn) is None


def test_operators_tell_name_arguments_and_kind() -> None:
    seen = []

    class Seeing(core.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seeing():
        torch.empty(2).normal_(1.0, 2.0)
    normal = seen[-1]
    assert core.schema_of(normal).name == "aten::normal_"
    assert [a.name for a in core.schema_of(normal).arguments] == ["self", "mean", "std", "generator"]
    assert not core.is_composite(normal)
    assert core.is_composite(torch.ops.aten.dropout.default)


# ------------------------------------------------------------ modules and optimizers


def test_calls_of_one_module_can_be_caught() -> None:
    module = nn.Linear(1, 1)
    module.register_forward_hook(lambda m, args, output: output * 0)
    assert core.compiled_call(module) is None
    vars(module)[core.COMPILED_CALL] = lambda x: x + 5
    assert core.compiled_call(module) is not None
    assert module(torch.ones(1)).item() == 6.0, "neither forward nor hooks run"
    assert core.plain_call(module)(torch.ones(1)).item() == 0.0, "forward and hooks run"


def test_what_torch_compile_wraps() -> None:
    model = nn.Linear(1, 1)
    wrapped = torch.compile(model, backend="eager")
    kind = core.compiled_wrapper()
    assert kind is not None
    assert isinstance(wrapped, kind)
    assert not isinstance(model, kind)
    assert core.inside_compiled(wrapped) is model
    core.compile_inside(wrapped)
    assert core.compiled_call(model) is not None
    other = nn.Linear(1, 1)
    core.compile_module(other)
    assert core.compiled_call(other) is not None
    assert torch.equal(model(torch.ones(1)), core.plain_call(model)(torch.ones(1)))


def test_fused_attention_on_a_cpu_runs_these_operators() -> None:
    seen = set()

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    query = torch.randn(1, 1, 4, 8, requires_grad=True)
    with Seen():
        nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    assert {core.cpu_attention, core.cpu_attention_backward} <= seen


# ------------------------------------------------------------ processes


def test_the_launchers_agent_overrides_what_torch_means_to_be_overridden() -> None:
    from paceline.launcher.agent import Agent

    theirs = vars(elastic.SimpleElasticAgent)
    source = inspect.getsource(elastic.SimpleElasticAgent)
    ours = {name for name, value in vars(Agent).items() if inspect.isfunction(value) and name in theirs}
    assert ours - {"__init__"} == set(elastic.OVERRIDDEN)
    assert all(f"self.{name} " in source or f"self.{name}:" in source for name in elastic.USED)
    for name in elastic.OVERRIDDEN:
        given = inspect.signature(theirs[name]).parameters
        inspect.signature(vars(Agent)[name]).bind(*given)  # raises TypeError where ours takes fewer


def test_the_state_of_the_dynamic_rendezvous_is_json_and_back() -> None:
    """Every field that torch's state has is carried; what is no state is refused."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

    state = _RendezvousState()
    assert set(vars(state)) == set(dynamic_rendezvous._FIELDS)
    now = datetime.now(timezone.utc)
    one, two = _NodeDesc("a", 1, 0), _NodeDesc("b", 2, 3)
    state.round, state.complete, state.closed, state.deadline = 3, True, True, now
    state.participants, state.wait_list, state.redundancy_list = {one: 0, two: 1}, {one}, {two}
    state.last_heartbeats = {one: now, two: now}
    text = dynamic_rendezvous.to_json(pickle.dumps(state))
    assert vars(pickle.loads(dynamic_rendezvous.from_json(text))) == vars(state)
    empty = dynamic_rendezvous.to_json(pickle.dumps(_RendezvousState()))
    assert vars(pickle.loads(dynamic_rendezvous.from_json(empty))) == vars(_RendezvousState())
    known = json.loads(text)
    wrong = [{"round": "1"}, {"complete": 1}, {"deadline": "2020-01-01"}, {"wait_list": [["a", 1]]}, {"more": 1}]
    wrong += [{"participants": [["a", 1, 0, "0"]]}, {"last_heartbeats": {"a": 1}}, {"redundancy_list": [[["a"], 1, 1]]}]
    for bad in ("", "[]", "[" * 100000, *(json.dumps(known | change) for change in wrong)):
        with pytest.raises(ValueError, match="invalid rendezvous state"):
            dynamic_rendezvous.from_json(bad)


STORE_CALLS = """
import datetime, sys, torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
def soon(seconds=0.2):
    return datetime.timedelta(seconds=seconds)
def tried(call, *arguments):
    try:
        return call(*arguments)
    except dist.DistError as error:
        return type(error).__name__
stores = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False, timeout=soon(20))
for turn, store in enumerate((stores, PrefixStore("p", stores), stores.clone())):
    store.set("a", "1")
    store.append("b", "x"), store.append("b", "y")
    store.multi_set(["c", "d"], ["3", "4"])
    print(store.get("a"), store.get("b"), store.multi_get(["c", "d"]), store.add("n", 5), store.add("n", -7))
    print(store.check(["a", "b"]), store.check(["a", "z"]), store.delete_key("a"), store.delete_key("a"))
    print([store.compare_set("e", *pair) for pair in (("x", "1"), ("", "2"), ("x", "3"), ("2", "4"))])
    print(store.wait(["c"]), tried(store.wait, ["z"], soon()), store.get("c"))
    print(store.queue_push("q", "v"), store.queue_len("q"), store.queue_pop("q"), tried(store.queue_pop, "q", False))
    print(tried(store.barrier, "one", 1), tried(store.barrier, f"two{turn}", 2, soon()), store.get("c"))
    for key in ("b", "c", "d", "e", "n"):
        store.delete_key(key)
print(sorted(stores.list_keys())[:0], stores.get_timeout() if hasattr(stores, "get_timeout") else "")
"""


@pytest.mark.conformance
def test_the_launchers_store_answers_torchs_client_as_torchs_own_server_does(tmp_path: Path) -> None:
    """Which bytes that client sends is torch's own affair: a version with others is seen here."""
    from paceline.launcher.checks import listen
    from paceline.launcher.store import open_store

    (tmp_path / "calls.py").write_text(STORE_CALLS)
    theirs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    ours = open_store(listen("127.0.0.1", 0))
    try:
        said = [
            subprocess.run(
                [sys.executable, str(tmp_path / "calls.py"), str(port)],
                capture_output=True, text=True, timeout=100, check=True,
            ).stdout
            for port in (theirs.port, ours.port)
        ]  # fmt: skip
    finally:
        ours.close()
        del theirs  # it stops listening
    assert said[0] == said[1]
    assert said[1].count("DistStoreError") == 6


def test_torchs_rendezvous_goes_through_the_launchers_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes its client by the name TCPStore of its own module, with the place in these two arguments."""
    theirs = importlib.import_module("torch.distributed.rendezvous")

    from paceline.launcher.store_redirect import redirect

    made: list[tuple[Any, ...]] = []

    def fake(host_name: str, port: int, *args: Any, **options: Any) -> dist.Store:  # type: ignore[name-defined]
        made.append((host_name, port))
        return dist.HashStore()  # type: ignore[attr-defined]

    monkeypatch.setattr(theirs, "TCPStore", fake)
    redirect(theirs)
    place = {"MASTER_ADDR": "n0", "MASTER_PORT": "77", "RANK": "0", "WORLD_SIZE": "1", "PACELINE_STORE_PORT": "88"}
    for name, value in {**place, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    for method in ("env://", "tcp://n0:77", "tcp://n0:78"):
        next(theirs.rendezvous(method, 0, 1))
    assert made == [("127.0.0.1", 88), ("127.0.0.1", 88), ("n0", 78)]


@pytest.mark.ranks(2)
def test_the_reducer_is_driven_by_a_backward() -> None:
    from paceline.torch_private import reducer

    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1), nn.Linear(1, 1))
    untouched, rank = model[2], dist.get_rank()
    reducer.ignore(model, ["1.running_mean", "1.running_var", "1.num_batches_tracked", "2.weight", "2.bias"])
    ddp = DistributedDataParallel(model, **reducer.NO_BUFFERS, init_sync=False)
    assert not any(hasattr(p, "_ddp_ignored") for p in model.parameters())
    for step in range(2):
        model.zero_grad()
        for arm in reducer.arming(ddp.reducer):
            arm()
        (model[0].weight.sum() * (rank + 1) + untouched.weight.sum() * (rank + 1)).backward()
        with pytest.raises(RuntimeError):
            reducer.check_finalized(ddp.reducer)  # the norm's gradients have not come
        (model[1].weight.sum() + model[1].bias.sum()).backward()
        reducer.check_finalized(ddp.reducer)
        assert model[0].weight.grad is not None
        assert (model[0].weight.grad.item(), untouched.weight.grad) == (1.5, torch.full((1, 1), rank + 1.0))
        if step == 0:
            assert reducer.rebuild_buckets(ddp.reducer)
    reducer.remove_hooks(ddp.reducer)
    again = DistributedDataParallel(model, **reducer.NO_BUFFERS, init_sync=False, static_graph=True)
    for arm in reducer.arming(again.reducer):
        arm()
    (model[0].weight.sum() + model[1].weight.sum() + model[1].bias.sum()).backward()
    reducer.delay_all_reduce(again.reducer)
    reducer.rebuild_buckets(again.reducer)
    reducer.remove_hooks(again.reducer)


def test_the_first_bucket_is_small_in_versions_that_take_a_list_of_sizes_and_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.nn.parallel import distributed

    from paceline.torch_private import reducer

    assert reducer._FIRST_BUCKET_MB * 2**20 == dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
    assert reducer._DEFAULT_BUCKET_MB == distributed._DEFAULT_BUCKET_CAP_MB  # type: ignore[attr-defined]
    for size in (0.5, 1, 25, 50):
        inspect.signature(DistributedDataParallel).bind(nn.Linear(1, 1), **reducer.bucket_sizes(size))
    assert reducer.bucket_sizes(25.0) == {"bucket_cap_mb_list": [1, 25]}
    assert reducer.bucket_sizes(0.5) == {"bucket_cap_mb": 0.5}
    without = {k: v for k, v in reducer._ARGUMENTS.items() if k != "bucket_cap_mb_list"}
    monkeypatch.setattr(reducer, "_ARGUMENTS", without)
    assert reducer.bucket_sizes(25.0) == {"bucket_cap_mb": None}  # torch's own sizes: 1 MB, then 25
    assert reducer.bucket_sizes(50.0) == {"bucket_cap_mb": 50.0}


def test_what_torch_compile_makes_is_cut_at_buckets_until_it_shall_stay_whole() -> None:
    from torch._dynamo.testing import CompileCounter

    from paceline.torch_private import reducer

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    for bucket_mb, graphs in ((0.5, 4), (1, 4), (2, 3), (None, 1)):
        torch._dynamo.reset()
        counter = CompileCounter()
        reducer.split_compiled_graphs(bucket_mb)
        try:
            torch.compile(Layers(), backend=counter)(torch.ones(1, 512))
        finally:
            reducer.split_compiled_graphs(None)
        assert counter.frame_count == graphs, bucket_mb


@pytest.mark.ranks(2)
def test_fsdp2_by_its_states() -> None:
    from torch.distributed.fsdp import fully_shard as shard

    from paceline.torch_private import fully_shard

    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    fully_shard.checkpoint(model[0])
    for module in (model[0], model):
        shard(module)
    state = fully_shard.state_of(model)
    fully_shard.become_root(state)
    groups = list(fully_shard.groups_under(state))
    assert len(groups) == 2
    params = [p for group in groups for p in group.fsdp_params]
    assert [fully_shard.gathered(p) for p in params] == [None] * 4
    assert fully_shard.phase(state) == "IDLE"
    phases = []
    model.forward_twice = lambda x: phases.append(fully_shard.phase(state)) or model[1](model[0](x)) * 2  # type: ignore[assignment]
    whole = fully_shard.as_forward(state, model, model.forward_twice, (torch.ones(1, 2),), {})
    assert phases == ["FORWARD"]
    assert all(fully_shard.gathered(p) is not None for p in params)
    whole.sum().backward()
    fully_shard.finish_backward(state)
    assert {fully_shard.phase(group) for group in groups} == {"IDLE"}
    assert all(p.sharded_param.grad is not None for p in params)
    groups[0].unshard()
    groups[0].wait_for_unshard()
    fully_shard.slice_again(groups[0])
    assert all(p.to_local().numel() < p.numel() for p in model[0].parameters())


@pytest.mark.ranks(2)
def test_dtensors_placements_rules_and_random_numbers() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from paceline.torch_private import distributed_tensor as private

    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    rows = torch.arange(12.0)[:, None]
    thirds = distribute_tensor(rows, mesh, [private.StridedShard(0, split_factor=3)], src_data_rank=None)
    assert thirds.to_local().flatten().tolist() == [i + 2 * rank for i in (0.0, 1.0, 4.0, 5.0, 8.0, 9.0)]
    assert torch.equal(thirds.full_tensor(), rows)
    for placement, values in (
        (private.StridedShard(0, split_factor=3), [0.0, 1.0, 4.0, 5.0, 8.0, 9.0]),
        (Shard(0), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
    ):
        assert private.part_of(rows, placement, 2, 0).flatten().tolist() == values
    assert private.part_of(rows[:3], Shard(0), 2, 1).flatten().tolist() == [2.0]  # the last has fewer
    cut = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    private.set_local(cut, torch.ones(2))
    assert cut.full_tensor().tolist() == [1.0] * 4
    cut.to_local().add_(1)
    assert core.version_within(cut) == core.version_of(cut.to_local())

    class Noting(private.Draws):
        @contextmanager
        def around(self, spec: Any, generator: torch.Generator | None) -> Iterator[None]:
            noted.append((spec.mesh, spec.placements))
            yield

    noted: list[Any] = []
    with private.drawing_by(Noting(), mesh):
        made = nn.functional.dropout(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]), 0.5)
        made.to_local()
    assert noted == [(mesh, (Shard(0),))]
    query, asked = distribute_tensor(torch.ones(1, 2, 8, 8), mesh, [Shard(1)]), []

    def refuse(op: Any, args: Any) -> None:
        asked.append((op, args[-1]))
        raise ZeroDivisionError

    for op in private.ATTENTION:
        before = () if "flash" in str(op) else (None, True)
        with private.checking([op], refuse), pytest.raises((ZeroDivisionError, RuntimeError)):
            op(query, query, query, *before, 0.25)
    assert asked == [(op, 0.25) for op in private.ATTENTION]


# ------------------------------------------------------------ what the doctor watches


def test_ddp_and_fsdp_have_the_methods_that_the_doctor_stands_around() -> None:
    for name in (observed.DDP_SENDS_BUFFERS, observed.DDP_BEFORE_FORWARD, observed.DDP_AFTER_FORWARD):
        assert callable(getattr(DistributedDataParallel, name))
    state = importlib.import_module(observed.FSDP_STATES).FSDPState
    assert list(inspect.signature(getattr(state, observed.FSDP_BEFORE_FORWARD)).parameters)[1:] == [
        "module", "args", "kwargs",
    ]  # fmt: skip
    function = importlib.import_module(observed.FSDP_FUNCTIONS).fully_shard
    exporting = [name for name in observed.FSDP_EXPORTS if getattr(sys.modules.get(name), "fully_shard", None)]
    assert "torch.distributed.fsdp" in exporting
    assert all(sys.modules[name].fully_shard is function for name in exporting)


# ------------------------------------------------------------ methods of torch's that our classes override

MEANT = {
    "_should_skip_dynamo",  # of TorchDispatchMode: shall torch.compile look at it?
    "_check_input_dim",  # of batch norms, which leave it to their subclasses
    "_backward_cls",  # of torch.autograd.Function, which makes one for each subclass
}


def test_our_classes_override_no_other_private_method_of_torchs() -> None:
    """Such a method would change its meaning with torch, and no name of torch's is read that a test could find."""
    root = Path(paceline.__file__).parent
    for path in root.rglob("*.py"):
        name = ".".join(("paceline", *path.relative_to(root).with_suffix("").parts))
        if path.stem not in ("deepspeed_engine", "__main__", "__init__"):  # the first needs DeepSpeed
            importlib.import_module(name)
    checked = 0
    for cls in {c for m in [*sys.modules.values()] for c in vars(m).values() if inspect.isclass(c)}:
        torchs = [base for base in cls.__mro__ if str(base.__module__).split(".")[0] == "torch"]
        if str(cls.__module__).startswith("paceline") and torchs:
            checked += 1
            callables = {
                n for n, value in vars(cls).items() if callable(value) or isinstance(value, (classmethod, property))
            }
            private = {name for name in callables if name.startswith("_") and not name.startswith("__")}
            known = MEANT | (set(elastic.OVERRIDDEN) if cls.__name__ == "Agent" else set())
            over = {name for name in private - known if any(name in vars(base) for base in torchs)}
            assert not over, f"{cls}: {over}"
    assert checked > 10


# ------------------------------------------------------------ the flight recorder


@pytest.mark.conformance
def test_the_flight_recorder_tells_the_calls_of_each_group() -> None:
    code = """
import torch, torch.distributed as dist
from paceline.torch_private import flight_recorder
assert flight_recorder.read() == []
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
pair = dist.new_group([0], group_desc="pair")
for _ in range(10):
    dist.all_reduce(torch.ones(2, 3, dtype=torch.bfloat16))
dist.broadcast(torch.ones(4, dtype=torch.int64), 0, group=pair)
for one in flight_recorder.unpacked(flight_recorder.packed(flight_recorder.read())):
    print(one.title, one.under_way, one.queued, len(one.ended), one.ended[-1].number, one.ended[-1], sep="; ")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "default_pg (gloo); None; 0; 8; 10; all_reduce of bfloat16 [2, 3]",
        "pair (gloo); None; 0; 1; 1; broadcast of int64 [4]",
    ]


def entry(record: int, name: str, number: int, *, retired: bool, p2p: bool = False, **tensors: Any) -> dict[str, Any]:
    """Of torch's record, what is read of it, as version 2.10 of its JSON has it."""
    numbers = {"collective_seq_id": 0 if p2p else number, "p2p_seq_id": number if p2p else 0, "is_p2p": p2p}
    given = {"input_dtypes": list(tensors), "input_sizes": list(tensors.values())}
    group = {"process_group": ["0", "default_pg"]}
    return {"record_id": record, "profiling_name": name, "retired": retired} | numbers | given | group


def recorded(monkeypatch: pytest.MonkeyPatch, **dumps: list[dict[str, Any]]) -> list[flight_recorder.GroupCalls]:
    """What is read where torch has recorders of these names, with these calls."""
    module = SimpleNamespace(
        **{name: lambda *_, calls=calls: json.dumps({"entries": calls}) for name, calls in dumps.items()}
    )
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", module)
    return flight_recorder.read()


def test_the_calls_of_nccl_and_those_of_gloo_have_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of both ("cpu:gloo,cuda:nccl"), and a torch that tells all calls under both names."""
    nccl = [
        entry(0, "nccl:_all_gather_base", 1, retired=True, Half=[8]),
        entry(1, "nccl:all_reduce", 2, retired=False, Float=[1024]),
        entry(2, "nccl:send 0->1", 1, retired=False, p2p=True, Float=[2], Long=[3]),
    ]
    gloo = [entry(0, "gloo:barrier", 1, retired=True)]
    both = nccl + gloo
    for of_nccl, of_gloo in (
        recorded(monkeypatch, _dump_nccl_trace_json=nccl, _dump_fr_trace_json=gloo),
        recorded(monkeypatch, _dump_nccl_trace_json=both, _dump_fr_trace_json=both),
    ):
        assert (of_nccl.title, of_gloo.title) == ("default_pg (nccl)", "default_pg (gloo)")
        assert of_nccl.under_way == flight_recorder.Call(2, "all_reduce", "float32 [1024]", False)
        assert of_nccl.queued == 2
        assert [str(call) for call in of_nccl.ended] == ["_all_gather_base of float16 [8]"]
        assert of_gloo.under_way is None
        assert [call.numbered for call in of_gloo.ended] == ["call 1, barrier"]


def test_a_recorder_that_tells_otherwise_ends_no_thread(tmp_path: Path) -> None:
    """Asked for its calls, the process answers that it has none; then it still tells where it stands."""
    code = """
import sys, time, types
from paceline.launcher import stack_thread
other = types.ModuleType("another version of torch")
other._dump_fr_trace_json = lambda *args: '{"entries": [{}]}'
sys.modules["torch._C._distributed_c10d"] = other
stack_thread.serve(sys.argv[1])
print("ready", flush=True)
time.sleep(60)
"""
    from paceline.launcher import stack_thread

    file = str(tmp_path / "errors")
    process = subprocess.Popen([sys.executable, "-c", code, file], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert stack_thread.ask_calls({process.pid: file}, 10.0) == {process.pid: []}
        assert stack_thread.ask({process.pid: file}, 10.0)[process.pid].frames
    finally:
        process.kill()
        process.communicate()
