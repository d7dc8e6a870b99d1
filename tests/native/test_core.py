"""Tensors, threads and recorded graphs of the native kernels."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

cn = pytest.importorskip("cardan_native")

VARIANTS = cn.available()


@pytest.fixture(params=VARIANTS)
def native(request: pytest.FixtureRequest) -> object:
    return cn.load(request.param)


@pytest.fixture
def two_threads(native):
    native.set_threads(2)
    yield native
    native.set_threads(1)


def tensor(native, values) -> object:
    return cn.to_tensor(native, np.asarray(values, np.float32))


# --- which variant ---


def test_the_plainest_variant_runs_everywhere_and_the_best_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARDAN_ISA", raising=False)
    assert VARIANTS[0] == "portable"
    assert cn.chosen() == VARIANTS[-1]
    assert [cn.load(name).VARIANT for name in VARIANTS] == list(VARIANTS)


def test_a_variant_can_be_forced_and_one_that_does_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARDAN_ISA", "portable")
    assert cn.chosen() == "portable"
    monkeypatch.setenv("CARDAN_ISA", "abacus")
    with pytest.raises(
        ValueError, match=r"CARDAN_ISA must name a variant that this processor runs, portable.*'abacus'"
    ):
        cn.chosen()
    with pytest.raises(ValueError, match=r"This processor runs portable.*got 'abacus'. Take one of them"):
        cn.load("abacus")


def test_variants_do_not_take_each_others_tensors() -> None:
    if len(VARIANTS) < 2:
        pytest.skip("this processor runs one variant only")
    with pytest.raises(TypeError):
        cn.load(VARIANTS[0]).silu(tensor(cn.load(VARIANTS[1]), [1.0]))


# --- tensors ---


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint8", "bool"])
def test_arrays_come_back_as_they_went(native, dtype: str) -> None:
    array = (np.arange(24).reshape(2, 3, 4) % 2).astype(dtype)
    x = cn.to_tensor(native, array)
    assert (x.dtype, x.shape, x.nbytes) == (dtype, (2, 3, 4), array.nbytes)
    back = cn.to_array(x)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_a_strided_array_is_copied_in_its_own_order(native) -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::-1].T
    np.testing.assert_array_equal(cn.to_array(cn.to_tensor(native, array)), array)


def test_a_copy_is_a_copy_and_bits_are_the_memory(native) -> None:
    array = np.ones(3, np.float32)
    x = cn.to_tensor(native, array)
    array[:] = 2
    copy = cn.to_array(x)
    x.bits()[0] = 7
    np.testing.assert_array_equal(copy, [1, 1, 1])
    np.testing.assert_array_equal(cn.to_array(x), [7, 1, 1])


def test_bits_outlive_their_tensor(native) -> None:
    bits = tensor(native, np.arange(1000)).bits()
    gc.collect()
    held = [tensor(native, np.full(1000, np.nan)) for _ in range(20)]
    np.testing.assert_array_equal(bits, np.arange(1000))
    del held


def test_bfloat16_comes_as_float32(native) -> None:
    x = native.cast(tensor(native, [1.0, -2.5, np.inf]), "bfloat16")
    assert x.dtype == "bfloat16"
    back = cn.to_array(x)
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back, [1.0, -2.5, np.inf])


def test_contents_are_replaced_in_place(native) -> None:
    x = native.Tensor.zeros((2, 2), "int32")
    view = x.bits()
    x.copy_bits(np.arange(4, dtype=np.int32).reshape(2, 2))
    np.testing.assert_array_equal(view, [[0, 1], [2, 3]])


def test_views_share_memory_and_copies_do_not(native) -> None:
    array = np.arange(2 * 12, dtype=np.float32).reshape(2, 12)
    x = cn.to_tensor(native, array)
    part = x.columns(4, 8)
    heads = part.split_heads(2)
    np.testing.assert_array_equal(heads.bits(), array[:, 4:].reshape(2, 2, 4))
    np.testing.assert_array_equal(heads.merge_heads().bits(), array[:, 4:])
    np.testing.assert_array_equal(part.reshaped((4, 4)).bits(), array[:, 4:].reshape(4, 4))
    np.testing.assert_array_equal(heads.contiguous().bits(), array[:, 4:].reshape(2, 2, 4))
    x.bits()[0, 4] = 99
    assert part.bits()[0, 0] == heads.bits()[0, 0, 0] == heads.merge_heads().bits()[0, 0] == 99
    assert heads.contiguous().contiguous().bits()[0, 0, 0] == 99


@pytest.mark.parametrize("shape", [(3, 8), (-1,), (2, -1, 2), (1, 24, 1)])
def test_reshaping_keeps_the_order(native, shape: tuple[int, ...]) -> None:
    array = np.arange(24, dtype=np.int32).reshape(6, 4)
    np.testing.assert_array_equal(cn.to_array(cn.to_tensor(native, array).reshaped(shape)), array.reshape(shape))


def test_what_does_not_fit_is_refused_with_what_was_got(native) -> None:
    x = tensor(native, np.zeros((2, 6)))
    for call, message in (
        (lambda: x.columns(3, 4), r"columns 3 to 7 are not all in float32 \[2, 6\]"),
        (lambda: x.columns(-1, 2), r"columns -1 to 1 are not all in float32 \[2, 6\]"),
        (lambda: x.split_heads(4), r"float32 \[2, 6\] does not split into 4 heads"),
        (lambda: x.reshaped((5, -1)), r"float32 \[2, 6\] does not reshape to \[5, -1\]"),
        (lambda: tensor(native, [1.0]).merge_heads(), r"float32 \[1\] has no heads to merge"),
        (lambda: native.Tensor.empty((), "float32"), "a tensor has 1 to 4 axes"),
        (lambda: native.Tensor.empty((2, -1), "float32"), "axes are 0 or longer"),
        (lambda: native.Tensor.empty((2,), "float64"), "dtype must be float32, bfloat16.*got 'float64'"),
        (lambda: native.Tensor.from_bits(np.zeros(3, np.uint8), "float32"), "array has 3 bytes, but .* takes 12"),
        (lambda: x.columns(0, 3).copy_bits(np.zeros((2, 3), np.float32)), "only a contiguous tensor can be filled"),
        (lambda: cn.to_tensor(native, np.zeros(2)), "array must be float32.*got float64. Convert it first"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_tensor_says_what_it_is(native) -> None:
    assert repr(native.Tensor.zeros((2, 3), "bfloat16")) == "Tensor(bfloat16 [2, 3])"


def test_large_zeros_cost_nothing_until_they_are_touched(native) -> None:
    before = resident_bytes()
    pool = native.Tensor.zeros((1 << 16, 1 << 12), "float32")
    assert resident_bytes() - before < 64 << 20
    assert pool.nbytes == 1 << 30
    assert not pool.bits()[::4096, 0].any()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_freed_blocks_of_many_sizes_do_not_pile_up(native) -> None:
    before = resident_bytes()
    for size in range(1, 200):
        x = native.Tensor.empty((size << 18,), "float32")
        x.bits()[::1024] = 1
    del x
    assert resident_bytes() - before < 300 << 20


# --- threads ---


def test_loops_give_the_same_on_any_number_of_threads(native) -> None:
    x = tensor(native, np.random.default_rng(0).normal(size=(37, 5000)))
    want = cn.to_array(native.log_softmax(x))
    try:
        for threads in (2, 3, 8, 1):
            native.set_threads(threads)
            assert native.threads() == threads
            for _ in range(20):
                np.testing.assert_array_equal(cn.to_array(native.log_softmax(x)), want)
    finally:
        native.set_threads(1)


def test_at_least_one_thread_computes(native) -> None:
    native.set_threads(0)
    assert native.threads() == 1


def test_loops_of_several_callers_do_not_mix(two_threads) -> None:
    """Each caller's results are its own, also while the number of threads changes."""
    native = two_threads
    failures: list[str] = []

    def compute(seed: int) -> None:
        array = np.random.default_rng(seed).normal(size=(9, 20_000)).astype(np.float32)
        x = cn.to_tensor(native, array)
        right = [np.array_equal(cn.to_array(native.scale(x, 2.0)), array * 2) for _ in range(60)]
        if not all(right):
            failures.append(f"caller {seed}")

    callers = [threading.Thread(target=compute, args=(seed,)) for seed in range(3)]
    for caller in callers:
        caller.start()
    for threads in (3, 1, 2, 4, 2):
        native.set_threads(threads)
    for caller in callers:
        caller.join()
    assert not failures


def test_many_short_loops_after_sleeps_all_finish(two_threads) -> None:
    """Threads that fell asleep between loops are woken, and none is left out of the end of a loop."""
    native = two_threads
    x = tensor(native, np.ones((2, 9000)))
    for round_index in range(300):
        if round_index % 30 == 0:
            threading.Event().wait(0.005)
        assert cn.to_array(native.scale(x, float(round_index))).min() == round_index


PROGRAM = """
import numpy as np, os, cardan_native as cn
native = cn.load({variant!r})
native.set_threads(3)
x = cn.to_tensor(native, np.ones((4, 20000), np.float32))
native.scale(x, 2.0)
child = os.fork()
if child == 0:
    assert (cn.to_array(native.scale(x, 3.0)) == 3).all()
    native.set_threads(2)
    assert (cn.to_array(native.scale(x, 4.0)) == 4).all()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_forked_process_computes_and_processes_end_while_threads_wait(variant: str) -> None:
    program = "import warnings; warnings.simplefilter('ignore')\n" + PROGRAM.format(variant=variant)
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- graphs ---


def test_a_graph_runs_again_over_what_its_inputs_hold_by_then(native) -> None:
    x = native.Tensor.zeros((2, 3), "float32")
    graph = native.Graph()
    with graph:
        doubled = native.scale(x, 2.0)
        result = native.add(native.silu(doubled), x)
    assert len(graph) == 3
    values = np.array([[1, -2, 3], [0.5, 0, 9]], np.float32)
    x.copy_bits(values)
    graph.replay()
    want = 2 * values / (1 + np.exp(-2 * values.astype(np.float64))) + values
    np.testing.assert_allclose(cn.to_array(result), want, rtol=1e-6)


def test_buffers_are_used_again_inside_a_graph_and_stay_where_they_are(native) -> None:
    x = tensor(native, np.ones((100, 1000)))
    graph = native.Graph()
    with graph:
        y = x
        for _ in range(20):
            y = native.scale(y, 1.5)
    assert len(graph) == 20
    assert graph.num_bytes <= 3 * x.nbytes
    junk = [tensor(native, np.full((100, 1000), np.nan)) for _ in range(4)]
    graph.replay()
    np.testing.assert_allclose(cn.to_array(y), 1.5**20, rtol=1e-5)
    del junk


def test_a_graph_keeps_what_it_reads(native) -> None:
    graph = native.Graph()
    with graph:
        result = native.scale(tensor(native, np.full(1000, 3.0)), 2.0)
    gc.collect()
    junk = [tensor(native, np.full(1000, np.nan)) for _ in range(10)]
    graph.replay()
    np.testing.assert_array_equal(cn.to_array(result), np.full(1000, 6.0))
    del junk


def test_host_arrays_that_come_while_it_records_are_not_written_over(native) -> None:
    x = tensor(native, np.ones(64))
    graph = native.Graph()
    with graph:
        first = native.add(x, tensor(native, np.full(64, 5.0)))
        second = native.scale(native.scale(first, 1.0), 1.0)
    for _ in range(2):
        graph.replay()
        np.testing.assert_array_equal(cn.to_array(second), np.full(64, 6.0))


def test_results_outlive_their_graph(native) -> None:
    graph = native.Graph()
    with graph:
        result = native.scale(tensor(native, np.ones(100)), 4.0)
    del graph
    gc.collect()
    np.testing.assert_array_equal(cn.to_array(result), np.full(100, 4.0))


def test_another_thread_is_not_recorded(native) -> None:
    x = tensor(native, np.ones(8))
    graph = native.Graph()
    with graph:
        other = threading.Thread(target=lambda: native.scale(x, 2.0))
        other.start()
        other.join()
        native.silu(x)
    assert len(graph) == 1


def test_two_graphs_do_not_record_at_once_and_a_failed_recording_ends(native) -> None:
    graph = native.Graph()
    with (
        pytest.raises(RuntimeError, match="a graph records already on this thread; end it first"),
        graph,
        native.Graph(),
    ):
        pass
    with native.Graph() as other:
        native.silu(tensor(native, [1.0]))
    assert len(other) == 1
    assert len(graph) == 0
