"""What is started: the flags and the environment of each replica, and what is refused with which advice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.adapters import Adapter, ModelRef
from inference.launch.plan import (
    LORA_RANKS,
    Device,
    LaunchError,
    LaunchSettings,
    Machine,
    ModelFacts,
    ReplicaPlan,
    WeightSyncMode,
    advice,
    plan,
)

ON_CPU = Machine("python", ("/extension", "/theirs"), Device.CPU, cores=4)
ON_GPUS = Machine("python", ("/extension",), Device.CUDA, gpus=("0", "1", "GPU-2"), cores=16)
FOLDER = ModelFacts(is_folder=True, width=128, head_dim=32, context=4_096)
ON_THE_HUB = ModelFacts(is_folder=False)
ADAPTED = replace(FOLDER, base="base", adapter=Adapter(ModelRef("someone/adapter"), {"r": 48}))
"""An adapter of rank 48 on a base."""


def one(settings: LaunchSettings, model: ModelFacts = FOLDER, machine: Machine = ON_CPU) -> ReplicaPlan:
    (replica,) = plan(settings, model, machine)
    return replica


def value(replica: ReplicaPlan, flag: str) -> str:
    """Return what follows a flag that occurs once."""
    (at,) = (index for index, argument in enumerate(replica.arguments) if argument == flag)
    return replica.arguments[at + 1]


def test_what_training_needs_is_set_on_every_device() -> None:
    for machine in (ON_CPU, ON_GPUS):
        replica = one(LaunchSettings("m"), machine=machine)
        assert replica.arguments[:5] == ("python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m")
        assert value(replica, "--logprobs-mode") == "processed_logprobs"
        assert value(replica, "--max-logprobs") == "-1"
        assert value(replica, "--generation-config") == "vllm"
        assert value(replica, "--worker-extension-cls") == "sqlenv_worker.SQLEnvWorker"
        assert value(replica, "--host") == "127.0.0.1"
        assert {"--enable-prefix-caching", "--no-enable-log-requests"} <= set(replica.arguments)
        assert replica.environment["VLLM_SERVER_DEV_MODE"] == "1"
        assert replica.environment["VLLM_NO_USAGE_STATS"] == "1"


def test_each_process_has_its_fingerprint() -> None:
    replica = one(LaunchSettings("m"))
    assert replica.command("x")[-4:] == ["--fingerprint-mode", "custom", "--fingerprint-value", "x"]


def test_vllms_own_flags_come_after_ours() -> None:
    assert one(LaunchSettings("m", extra=("--dtype", "half"))).arguments[-2:] == ("--dtype", "half")


def test_unset_limits_are_left_to_vllm() -> None:
    assert not {"--max-model-len", "--max-num-seqs"} & set(one(LaunchSettings("m")).arguments)
    replica = one(LaunchSettings("m", max_model_len=77, max_num_seqs=5))
    assert (value(replica, "--max-model-len"), value(replica, "--max-num-seqs")) == ("77", "5")


def test_a_cpu_replica_compiles_nothing_is_unpinned_and_has_its_share_of_the_cores() -> None:
    replicas = plan(LaunchSettings("m", replicas=3, cpu_kv_cache_gb=0.5), FOLDER, ON_CPU)
    for replica in replicas:
        assert "--enforce-eager" in replica.arguments
        assert value(replica, "--kv-cache-memory-bytes") == str(2**29)
        assert replica.environment["OMP_NUM_THREADS"] == "1"
        assert replica.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
        assert replica.environment["TORCH_COMPILE_DISABLE"] == "1"
    assert one(LaunchSettings("m")).environment["OMP_NUM_THREADS"] == "3"
    told = replace(ON_CPU, threads="4")
    assert one(LaunchSettings("m"), machine=told).environment["OMP_NUM_THREADS"] == "4", "the user has the last word"


@pytest.mark.parametrize(
    ("settings", "room"),
    [
        (LaunchSettings("m"), "4096"),
        (LaunchSettings("m", max_model_len=512), "2048"),
        (LaunchSettings("m", max_model_len=9_000), "9000"),
        (LaunchSettings("m", max_num_seqs=5_000), "5000"),
    ],
)
def test_a_cpu_step_has_room_for_the_longest_prompt(settings: LaunchSettings, room: str) -> None:
    replica = one(settings)
    assert "--no-enable-chunked-prefill" in replica.arguments
    assert value(replica, "--max-num-batched-tokens") == room
    assert "--no-enable-chunked-prefill" not in one(settings, machine=ON_GPUS).arguments


def test_an_unknown_context_has_to_be_given_on_a_cpu() -> None:
    with pytest.raises(LaunchError, match="Add --max_model_len"):
        plan(LaunchSettings("m"), ON_THE_HUB, ON_CPU)
    assert plan(LaunchSettings("m"), ON_THE_HUB, ON_GPUS)


@pytest.mark.parametrize(
    ("machine", "asked", "expected"),
    [
        (ON_CPU, "auto", "float32"),
        (replace(ON_CPU, cpu_dtype="bfloat16"), "auto", "bfloat16"),
        (ON_CPU, "bfloat16", "bfloat16"),
        (ON_GPUS, "auto", "auto"),
    ],
)
def test_a_cpu_serves_in_the_dtype_that_it_is_faster_in(machine: Machine, asked: str, expected: str) -> None:
    assert value(one(LaunchSettings("m", dtype=asked), machine=machine), "--dtype") == expected


def test_the_hub_is_asked_only_for_what_is_not_here() -> None:
    assert one(LaunchSettings("m")).environment["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in one(LaunchSettings("m", max_model_len=512), ON_THE_HUB).environment


def test_the_users_module_path_is_kept() -> None:
    assert one(LaunchSettings("m")).environment["PYTHONPATH"] == "/extension:/theirs"


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        (LaunchSettings("m"), "0.9"),
        (LaunchSettings("m", share_gpu=True), "0.3"),
        (LaunchSettings("m", share_gpu=True, gpu_memory_utilization=0.45), "0.45"),
    ],
)
def test_the_share_of_the_gpu(settings: LaunchSettings, share: str) -> None:
    assert value(one(settings, machine=ON_GPUS), "--gpu-memory-utilization") == share


def test_each_replica_has_a_port_and_a_gpu() -> None:
    replicas = plan(LaunchSettings("m", replicas=3, port=9000), FOLDER, ON_GPUS)
    assert [replica.url for replica in replicas] == [f"http://127.0.0.1:{port}" for port in (9000, 9001, 9002)]
    assert [value(replica, "--port") for replica in replicas] == ["9000", "9001", "9002"]
    assert [replica.environment["CUDA_VISIBLE_DEVICES"] for replica in replicas] == ["0", "1", "GPU-2"]
    assert "CUDA_VISIBLE_DEVICES" not in one(LaunchSettings("m"), machine=ON_GPUS).environment


@pytest.mark.parametrize(
    ("replicas", "extra", "gpus"),
    [
        (2, ("--tensor-parallel-size", "2"), ["0,1", "2,3"]),
        (2, ("--tensor_parallel_size=2", "--max-num-seqs", "8"), ["0,1", "2,3"]),
        (3, ("-tp", "2"), ["0,1", "2,3", "4,5"]),
        (2, ("-tp=3",), ["0,1,2", "3,4,5"]),
        (2, ("-tp", "1", "--pipeline-parallel-size", "2"), ["0,1", "2,3"]),
        (2, ("-tp", "4", "-tp", "2"), ["0,1", "2,3"]),
    ],
)
def test_replicas_that_compute_on_several_gpus_share_none(
    replicas: int, extra: tuple[str, ...], gpus: list[str]
) -> None:
    six = replace(ON_GPUS, gpus=("0", "1", "2", "3", "4", "5"))
    found = plan(LaunchSettings("m", replicas=replicas, extra=extra), FOLDER, six)
    assert [replica.environment["CUDA_VISIBLE_DEVICES"] for replica in found] == gpus


@pytest.mark.parametrize(("dtype", "exact"), [("float32", True), ("bfloat16", False), ("auto", False)])
def test_float32_on_a_gpu_is_no_tf32(dtype: str, exact: bool) -> None:
    environment = one(LaunchSettings("m", dtype=dtype), machine=ON_GPUS).environment
    assert (environment.get("TRITON_F32_DEFAULT") == "ieee") == exact
    assert (environment.get("VLLM_FLOAT32_MATMUL_PRECISION") == "highest") == exact


@pytest.mark.parametrize(
    ("machine", "settings", "backend"),
    [
        (ON_CPU, LaunchSettings("m"), None),
        (ON_GPUS, LaunchSettings("m"), "nccl"),
        (ON_GPUS, LaunchSettings("m", share_gpu=True), None),
        (ON_GPUS, LaunchSettings("m", weight_sync=WeightSyncMode.DISK), None),
    ],
)
def test_the_weight_transfer(machine: Machine, settings: LaunchSettings, backend: str | None) -> None:
    replica = one(settings, machine=machine)
    if backend is None:
        assert "--weight-transfer-config" not in replica.arguments
    else:
        assert json.loads(value(replica, "--weight-transfer-config")) == {"backend": backend}


@given(st.integers(1, LORA_RANKS[-1]))
def test_a_lora_server_has_room_for_the_rank(rank: int) -> None:
    replica = one(LaunchSettings("m", weight_sync=WeightSyncMode.LORA, max_lora_rank=rank))
    room = int(value(replica, "--max-lora-rank"))
    assert room in LORA_RANKS
    assert room >= rank
    assert not any(rank <= smaller < room for smaller in LORA_RANKS)
    assert "--enable-lora" in replica.arguments
    assert replica.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


@pytest.mark.parametrize("machine", [ON_CPU, ON_GPUS])
def test_an_adapter_is_served_under_its_name_beside_its_base(machine: Machine) -> None:
    replica = one(LaunchSettings("my,a=b"), ADAPTED, machine)
    assert value(replica, "--model") == "base"
    assert json.loads(value(replica, "--lora-modules")) == {"name": "my,a=b", "path": "someone/adapter"}
    assert value(replica, "--max-lora-rank") == "64"
    assert "--enable-lora" in replica.arguments
    assert "--weight-transfer-config" not in replica.arguments
    assert replica.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1", "a run may push its own"
    larger = one(LaunchSettings("a", max_lora_rank=100), ADAPTED, machine)
    assert value(larger, "--max-lora-rank") == "128"


def test_an_adapters_folder_is_named_so_that_any_working_directory_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    replica = one(LaunchSettings("a"), replace(ADAPTED, adapter=Adapter(ModelRef("a"), {"r": 8})))
    assert json.loads(value(replica, "--lora-modules"))["path"] == str(tmp_path / "a")


def test_what_a_run_saved_is_loaded_in_its_place() -> None:
    assert value(one(LaunchSettings("run"), replace(FOLDER, base="run/model")), "--model") == "run/model"


@pytest.mark.parametrize("transport", [WeightSyncMode.DISK, WeightSyncMode.NCCL])
def test_a_server_with_an_adapter_takes_adapters_only(transport: WeightSyncMode) -> None:
    with pytest.raises(LaunchError, match="serve the base, --model base"):
        plan(LaunchSettings("a", weight_sync=transport), ADAPTED, ON_GPUS)


def test_an_adapter_that_vllm_computes_otherwise_is_to_be_merged() -> None:
    model = replace(ADAPTED, adapter=Adapter(ModelRef("a"), {"r": 8, "use_dora": True}))
    with pytest.raises(LaunchError, match=r"DoRA.*sqlenv export a --out"):
        plan(LaunchSettings("a"), model, ON_CPU)


@pytest.mark.parametrize(
    ("settings", "model", "words"),
    [
        (LaunchSettings("mine"), ADAPTED, "sqlenv export mine --out FOLDER; then --model FOLDER"),
        (LaunchSettings("base", weight_sync=WeightSyncMode.LORA), FOLDER, "disk sends them merged"),
    ],
)
def test_a_cpu_that_would_apply_adapters_is_advised_against(
    settings: LaunchSettings, model: ModelFacts, words: str
) -> None:
    assert words in (advice(settings, model, ON_CPU) or "")
    assert advice(settings, model, ON_GPUS) is None


@pytest.mark.parametrize("transport", [None, WeightSyncMode.DISK])
def test_a_server_of_whole_weights_needs_no_advice(transport: WeightSyncMode | None) -> None:
    assert advice(LaunchSettings("base", weight_sync=transport), FOLDER, ON_CPU) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "trainer.example", ""])
def test_a_host_that_others_can_reach_has_to_be_vouched_for(host: str) -> None:
    settings = LaunchSettings("m", host=host)
    with pytest.raises(LaunchError, match=r"change the weights.*--trusted_network"):
        plan(settings, FOLDER, ON_CPU)
    assert value(one(replace(settings, trusted_network=True)), "--host") == host


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8001"),
        ("127.0.0.9", "http://127.0.0.9:8001"),
        ("localhost", "http://localhost:8001"),
        ("::1", "http://[::1]:8001"),
    ],
)
def test_loopback_needs_no_word(host: str, url: str) -> None:
    assert one(LaunchSettings("m", host=host)).url == url


def test_every_interface_is_asked_for_health_on_this_machine() -> None:
    assert one(LaunchSettings("m", host="0.0.0.0", trusted_network=True)).url == "http://127.0.0.1:8001"
    assert one(LaunchSettings("m", host="::", trusted_network=True)).url == "http://[::1]:8001"


@pytest.mark.parametrize(
    ("settings", "machine", "words"),
    [
        (LaunchSettings("m", replicas=0), ON_CPU, "--replicas 0"),
        (LaunchSettings("m", port=0), ON_CPU, "--port 0"),
        (LaunchSettings("m", port=65_535, replicas=2), ON_CPU, "--port 65535"),
        (LaunchSettings("m", weight_sync=WeightSyncMode.NCCL), ON_CPU, "on a CPU use disk"),
        (LaunchSettings("m", share_gpu=True), ON_CPU, "--share_gpu is for GPUs"),
        (LaunchSettings("m", device=Device.CUDA), ON_CPU, "pip install -e '..vllm.'"),
        (LaunchSettings("m", device=Device.CPU), ON_GPUS, "make vllm-cpu"),
        (LaunchSettings("m", replicas=4), ON_GPUS, r"4 replica\(s\) need a GPU each, and 3"),
        (LaunchSettings("m", replicas=2, extra=("-tp", "2")), ON_GPUS, r"2 replica\(s\) need 2 GPUs each, and 3"),
        (LaunchSettings("m", extra=("-tp", "two")), ON_GPUS, "-tp two: a number of GPUs"),
        (LaunchSettings("m", extra=("--data-parallel-size",)), ON_GPUS, "--data-parallel-size : a number"),
        (LaunchSettings("m"), replace(ON_GPUS, gpus=()), "0 can be seen here; see CUDA_VISIBLE_DEVICES"),
        (LaunchSettings("m", weight_sync=WeightSyncMode.LORA, max_lora_rank=513), ON_CPU, "ranks up to 512"),
        (LaunchSettings("m", weight_sync=WeightSyncMode.LORA, max_lora_rank=0), ON_CPU, "--max_lora_rank 0"),
    ],
)
def test_what_cannot_work_is_refused_with_advice(settings: LaunchSettings, machine: Machine, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        plan(settings, FOLDER, machine)


def test_a_head_size_that_would_kill_the_server_is_refused() -> None:
    model = replace(FOLDER, head_dim=16)
    with pytest.raises(LaunchError, match="heads have size 16"):
        plan(LaunchSettings("m"), model, ON_CPU)
    assert plan(LaunchSettings("m"), model, ON_GPUS)
