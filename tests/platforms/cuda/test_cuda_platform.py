"""What GPU platforms say of themselves where there is no GPU: what is missing, what is claimed on which evidence."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from emulated_gpu import PLATFORMS, emulated

from cardan.cli.app import EXIT_FAILED, run
from cardan.errors import ConfigError, PlatformNotFoundError, UnsupportedError
from cardan.platform import DeviceInfo, Evidence, Feature, Memory, MemoryRequest, Support
from cardan.platform.discovery import choose_platform
from cardan_cuda.features import cuda_features, has_float8
from cardan_kernels.chips import CHIPS
from cardan_rocm.aiter_limits import ARCHS
from cardan_rocm.device import FLOAT8_FORMS
from cardan_rocm.features import FN_ARCHS, FNUZ_ARCHS, float8_form
from cardan_torch.gpu import accelerator, presence
from cardan_torch.gpu.memory import GPU_MEMORY
from cardan_torch.gpu.presence import AMD, NVIDIA, lacking, torch_runtime
from cardan_torch.gpu.settings import shared_options
from cardan_torch.own_memory import GIB, MIB, OwnMemoryPolicy


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Makes a torch be installed that was built for a runtime, and a driver's files be there."""
    (tmp_path / "torch").mkdir()
    origin = tmp_path / "torch" / "__init__.py"

    def make(runtime="", files=(), lacks=()):
        (tmp_path / "torch" / "version.py").write_text(runtime)
        for name in files:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        monkeypatch.setattr(
            presence, "find_spec", lambda name: None if name in lacks else SimpleNamespace(origin=str(origin))
        )
        monkeypatch.setattr(presence, "_version", lambda name: "2.11.0")
        return tmp_path

    return make


CUDA_BUILD, HIP_BUILD = "cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "cuda = None\nhip: str = '6.4.1'\n"

MISSING = [
    (NVIDIA, {"lacks": ("torch",)}, "torch is not installed; `pip install 'cardan[cuda]'` brings it"),
    (AMD, {"lacks": ("triton",)}, "triton is not installed; `pip install 'cardan[rocm]'` brings it"),
    (
        NVIDIA,
        {"runtime": HIP_BUILD},
        "torch 2.11.0 was built without CUDA; install a build that has it, such as "
        "`pip install torch --index-url https://download.pytorch.org/whl/cu128`",
    ),
    (
        AMD,
        {"runtime": CUDA_BUILD},
        "torch 2.11.0 was built without ROCm; install a build that has it, such as "
        "`pip install torch --index-url https://download.pytorch.org/whl/rocm6.4`",
    ),
    (NVIDIA, {"runtime": CUDA_BUILD}, "no NVIDIA driver is loaded: none of "),
    (AMD, {"runtime": HIP_BUILD}, "no AMD driver is loaded: none of "),
    (NVIDIA, {"runtime": CUDA_BUILD, "files": ("dev/nvidiactl",)}, "no NVIDIA GPU is visible: nothing matches "),
    (AMD, {"runtime": HIP_BUILD, "files": ("dev/kfd",)}, "no AMD GPU is visible: nothing matches "),
    (NVIDIA, {"runtime": CUDA_BUILD, "files": ("dev/nvidiactl", "dev/nvidia0")}, None),
    (NVIDIA, {"runtime": CUDA_BUILD, "files": ("dev/dxg",)}, None),
    (AMD, {"runtime": HIP_BUILD, "files": ("dev/kfd", "dev/dri/renderD128")}, None),
]


@pytest.mark.parametrize(("vendor", "machine", "wanted"), MISSING)
def test_the_first_thing_that_is_missing_is_named_with_what_to_do(installed, vendor, machine, wanted):
    root = installed(**machine)
    found = lacking(vendor, root)
    if wanted is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(wanted)


def test_the_runtime_is_read_from_torchs_own_file(installed):
    installed(CUDA_BUILD)
    assert (torch_runtime("cuda"), torch_runtime("hip")) == ("12.8", None)
    installed(HIP_BUILD)
    assert (torch_runtime("cuda"), torch_runtime("hip")) == (None, "6.4.1")


def test_probing_imports_no_torch_and_no_kernel():
    program = """
        import sys
        from cardan.platform.discovery import load_platform
        for name in ("cuda", "rocm"):
            platform = load_platform(name)
            assert platform.probe().reason
            platform.devices()
            assert platform.options()
        print(sorted({"torch", "triton", "cardan_kernels"} & set(sys.modules)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


@pytest.fixture(params=PLATFORMS)
def absent(request, monkeypatch):
    """A platform whose GPU is not there."""
    from cardan_torch.gpu import platform

    monkeypatch.setattr(platform, "lacking", lambda *_: "no such GPU")
    return request.param


def test_who_tries_a_platform_without_its_gpu_is_told_what_was_proven_instead(absent):
    with pytest.raises(PlatformNotFoundError) as refused:
        choose_platform(absent, trial=True)
    message = str(refused.value)
    assert message.startswith(f"Platform '{absent}' cannot run on this machine: no such GPU.")
    assert "What was proven without a GPU" in message
    assert " interpreted" in message
    assert f"conform --platform {absent} --platform-option device=emulated" in message
    with pytest.raises(PlatformNotFoundError) as plain:
        choose_platform(absent)
    assert "proven" not in str(plain.value)


def test_conform_without_a_gpu_ends_with_that_explanation_and_an_exit_code(absent, capsys):
    assert run(["conform", "--platform", absent]) == EXIT_FAILED
    shown = " ".join(capsys.readouterr().err.split())
    assert "cannot run on this machine: no such GPU" in shown
    assert "What was proven without a GPU" in shown


@pytest.mark.parametrize("name", PLATFORMS)
def test_no_answer_rests_on_hardware_and_every_one_has_a_reason(name):
    platform = emulated(name)
    (info,) = platform.devices()
    capabilities = platform.capabilities(info)
    answers = capabilities.features
    assert not set(map(str, Feature)) - set(map(str, answers))
    assert all(answer.evidence is not Evidence.HARDWARE for answer in answers.values())
    assert all(answer.reason for answer in answers.values())
    assert all(answer.alternative for answer in answers.values() if answer.support is Support.UNSUPPORTED)
    assert "No kernel of this platform has been run on a GPU" in capabilities.notes[0]


def test_floats_of_8_bits_are_multiplied_from_compute_capability_89_on():
    for arch, reason in (
        ("sm_80", "widened as they are multiplied"),
        ("sm_86", "widened"),
        ("sm_89", "multiplied with"),
    ):
        assert cuda_features(arch, None)["weights:FP8_128_F32"].reason.startswith(reason)


@pytest.mark.parametrize("name", CHIPS)
def test_what_kernels_and_answers_say_of_a_chips_floats_of_8_bits_is_the_same(name):
    known = CHIPS[name]
    if known.family == "cuda":
        assert has_float8(name) == (known.float8 is not None)
    elif known.family == "hip":
        assert FLOAT8_FORMS[float8_form(name)] is known.float8


def test_answers_name_no_chip_that_kernels_do_not_know():
    assert {*FNUZ_ARCHS, *FN_ARCHS, *ARCHS, *(kind.emulated_arch for kind in PLATFORMS.values())} <= set(CHIPS)


@pytest.mark.parametrize(("name", "arch"), [("cuda", "sm_75"), ("cuda", "sm_103"), ("rocm", "gfx1201")])
def test_a_chip_that_kernels_do_not_know_is_refused_in_the_plan_and_before_it_is_opened(name, arch, monkeypatch):
    info = DeviceInfo(index=0, name="some GPU", detail=f"{arch}, 108 units", total_memory=16 * GIB)
    platform = PLATFORMS[name]()
    monkeypatch.setattr(accelerator, "TorchAccelerator", lambda index: pytest.fail("opened"))
    with pytest.raises(UnsupportedError, match=rf"^some GPU cannot be used: the kernels are for .*, this is {arch}\."):
        platform.open(info, {})
    answers = platform.capabilities(info).features
    attention = [answer for name, answer in answers.items() if name.startswith("attention:")]
    assert attention
    assert all(answer.support is Support.UNSUPPORTED and f"this is {arch}" in answer.reason for answer in attention)


@pytest.mark.parametrize("top", [-1, 5000])
@pytest.mark.parametrize("name", PLATFORMS)
def test_a_largest_captured_step_that_cannot_be_is_refused(name, top):
    with pytest.raises(ConfigError, match=rf"cuda_graph_max_bs_decode must be 0 .* 1 to 4096 rows, got {top}\. Pass"):
        emulated(name, cuda_graph_max_bs_decode=top)


def test_options_are_described():
    assert {spec.name for spec in shared_options()} == {
        "cuda_graph_max_bs_decode",
        "batch_invariant_attention",
        "device",
    }


def test_devices_are_described_by_what_matters():
    (info,) = emulated("cuda").devices()
    assert info.detail.startswith("sm_90, ")
    assert info.total_memory == 64 * GIB


def test_tiers_grow_with_memory():
    for smaller, larger in itertools.pairwise(GPU_MEMORY.tiers):
        assert smaller.below < larger.below
        assert smaller.head_room <= larger.head_room
        assert smaller.top_bucket <= larger.top_bucket
    assert GPU_MEMORY.tier(None) is GPU_MEMORY.tiers[0]
    assert GPU_MEMORY.tier(8 * GIB).top_bucket == 16
    assert GPU_MEMORY.tier(24 * GIB).top_bucket == 64
    assert GPU_MEMORY.tier(80 * GIB).top_bucket == 256
    assert GPU_MEMORY.tier(141 * GIB).head_room == 3072 * MIB


def test_memory_is_divided_into_weights_activations_graphs_head_room_and_the_pool():
    request = MemoryRequest(
        memory=Memory(total=80 * GIB, free=60 * GIB),
        weight_bytes=16 * GIB,
        activation_bytes=GIB,
        graph_bytes=0,
        bytes_per_slot=128 * 1024,
        page_size=16,
        min_slots=32,
        useful_slots=1 << 24,
    )
    plan = OwnMemoryPolicy(GPU_MEMORY, buckets=36).plan(request)
    lines = {what: (size, why) for what, size, why in plan.lines}
    assert lines["weights"][0] == 16 * GIB
    assert lines["activations"][0] == GIB
    assert lines["graphs"] == (36 * 24 * MIB + GIB // 4, "captured steps of up to 36 sizes, which share memory")
    assert lines["head-room"][0] == 2048 * MIB
    left = 60 * GIB - GIB - lines["graphs"][0] - 2048 * MIB
    assert left - 16 * 128 * 1024 < plan.pool_bytes + 16 * 128 * 1024 <= left + 16 * 128 * 1024
    assert OwnMemoryPolicy(GPU_MEMORY, buckets=0).graph_bytes(GIB) == 0
    assert not OwnMemoryPolicy(GPU_MEMORY, buckets=1).under_pressure(request.memory)


def test_a_device_without_chip_facts_is_named_by_its_first_word():
    from cardan_torch.gpu.platform import arch_of

    assert arch_of(DeviceInfo(index=0, name="x", detail="gfx942, 304 units, HIP 6.4")) == "gfx942"
