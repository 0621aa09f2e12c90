"""LoRA adapters: what peft computes, side by side in one batch, and never over another adapter's state."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from engine import messages as m
from engine.adapters import Adapters, read_adapter
from engine.errors import BadRequest
from tests.engine.driver import EngineDriver, random_tokens, submit
from tests.engine.kinds import write_model

pytestmark = pytest.mark.process

Start = Callable[..., EngineDriver]


@pytest.fixture
def weights() -> None:
    """Each engine has a module of its own: adapters are put into it."""


def make_adapter(model_dir: Path, directory: Path, seed: int, **options: Any) -> str:
    """A LoRA with random weights, strong enough to change greedy answers; returns its digest."""
    import torch.distributed.tensor  # peft looks into it, and relies on transformers, which an engine keeps from importing it
    from peft import LoraConfig, get_peft_model  # takes seconds: not for those who only collect these tests

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    targets = options.pop("target_modules", ["q_proj", "v_proj", "down_proj"])
    tuned = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=targets, **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    tuned.save_pretrained(str(directory))
    return m.adapter_digest(directory)


@pytest.fixture(scope="module")
def adapters(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters, by digest."""
    made = {}
    for seed, options in ((1, {}), (2, {"use_rslora": True, "alpha_pattern": {"v_proj": 8}})):
        directory = tmp_path_factory.mktemp("adapter")
        made[make_adapter(tiny_dir, directory, seed, **options)] = directory
    return made


def loaded(engine: EngineDriver, adapters: dict[str, Path]) -> EngineDriver:
    for digest, directory in adapters.items():
        engine.handle(m.LoadAdapter(7, digest, str(directory)))
        assert engine.sent[-1] == m.AdapterReady(7)
    return engine


def by_peft(tiny_dir: Path, directory: Path, prompt: list[int], count: int) -> list[int]:
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    tuned = PeftModel.from_pretrained(model, str(directory))
    ids = torch.tensor([prompt])
    made = tuned.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, eos_token_id=None
    )
    return made[0, len(prompt) :].tolist()


def test_an_adapter_computes_what_peft_computes(start_engine: Start, tiny_dir: Path, adapters: dict[str, Path]) -> None:
    prompt = random_tokens(70, 90)
    engine = loaded(start_engine(), adapters)
    answers = {}
    for digest, directory in adapters.items():
        engine.handle(submit(digest, prompt, 16, adapter=digest))
        engine.run()
        answers[digest] = engine.tokens(digest)
        assert answers[digest] == by_peft(tiny_dir, directory, prompt, 16)
        assert engine.started(digest).verdict == "new", "no other adapter's state is taken over"
    engine.handle(submit("base", prompt, 16))
    engine.run()
    assert engine.started("base").verdict == "new"
    assert len({tuple(tokens) for tokens in (*answers.values(), engine.tokens("base"))}) == 3


def test_sessions_with_different_adapters_share_a_batch(start_engine: Start, adapters: dict[str, Path]) -> None:
    prompts = {name: random_tokens(80 + index, 60 + index) for index, name in enumerate("abcd")}
    used = dict(zip("abcd", ["", *adapters, next(iter(adapters))], strict=True))
    want = m.Sampling(temperature=0.9, seed=4, logprobs=0)
    beside = loaded(start_engine("beside"), adapters)
    beside.handle(*(submit(n, p, 12, sampling=want, adapter=used[n], namespace="x") for n, p in prompts.items()))
    beside.run()
    for name, prompt in prompts.items():
        alone = loaded(start_engine(f"alone-{name}"), adapters)
        alone.handle(submit(name, prompt, 12, sampling=want, adapter=used[name], namespace="y"))
        alone.run()
        got, expected = beside.outputs(name), alone.outputs(name)
        assert [(o.token, o.logprobs) for o in got] == [(o.token, o.logprobs) for o in expected], name


@pytest.mark.parametrize("way", ["tiles", "tokens"])
def test_with_an_adapter_a_deterministic_turn_on_cached_state_equals_a_cold_one(
    start_engine: Start, adapters: dict[str, Path], way: Literal["tiles", "tokens"]
) -> None:
    """Rows that were decoded are a prompt's rows then; another adapter beside it."""
    prompt, (digest, other) = random_tokens(72, 90), adapters
    want = m.Sampling(temperature=0.9, seed=4, logprobs=0)
    engine = loaded(start_engine(deterministic=True), adapters)
    engine.engine.cache.exact = way
    engine.handle(submit("beside", random_tokens(73, 30), 24, sampling=want, adapter=other))
    engine.handle(submit("first", prompt, 12, sampling=want, adapter=digest))
    engine.run()
    turn = prompt + engine.tokens("first") + random_tokens(74, 20)
    engine.handle(submit("turn", turn, 8, sampling=want, adapter=digest))
    engine.handle(submit("cold", turn, 8, sampling=want, adapter=digest, namespace="cold"))
    engine.run()
    assert engine.started("turn").reused and not engine.started("cold").reused
    turned, cold = engine.outputs("turn"), engine.outputs("cold")
    assert [(o.token, o.logprobs) for o in turned] == [(o.token, o.logprobs) for o in cold]


def test_adapters_of_recurrent_layers_keep_a_deterministic_row_to_itself(start_engine: Start, tmp_path: Path) -> None:
    """Such a layer is computed row by row, under each row's own adapter, in a batch where the rows' differ."""
    model = write_model("granitemoehybrid", tmp_path / "hybrid")
    adapters = {}
    for seed in (3, 4):
        directory = tmp_path / f"adapter{seed}"
        adapters[make_adapter(model, directory, seed, target_modules=["in_proj", "out_proj", "q_proj"])] = directory
    want = m.Sampling(temperature=0.9, seed=4, logprobs=0)
    engine = loaded(start_engine(deterministic=True, model_dir=model), adapters)
    assert engine.engine.cache.exact == "parts"
    used = dict(zip("abc", ["", *adapters], strict=True))
    prompts = {name: random_tokens(90 + index, 20 + index) for index, name in enumerate(used)}
    engine.handle(*(submit(name, prompts[name], 6, sampling=want, adapter=used[name]) for name in used))
    engine.run()
    for name, prompt in prompts.items():
        engine.handle(submit(f"alone {name}", prompt, 6, sampling=want, adapter=used[name], namespace="alone"))
        engine.run()
        beside, alone = engine.outputs(name), engine.outputs(f"alone {name}")
        assert [(o.token, o.logprobs) for o in beside] == [(o.token, o.logprobs) for o in alone], name


def test_a_stream_with_an_adapter_is_restored_elsewhere(start_engine: Start, keeper, adapters: dict[str, Path]) -> None:
    prompt, digest = random_tokens(71, 290), next(iter(adapters))
    hot = m.Sampling(temperature=0.8, seed=5)
    calm = loaded(start_engine("calm"), adapters)
    calm.handle(submit("calm", prompt, 12, sampling=hot, adapter=digest, namespace="calm"))
    calm.run()
    serving, spare = loaded(start_engine("serving"), adapters), loaded(start_engine("spare"), adapters)
    serving.handle(submit("s", prompt, 12, sampling=hot, adapter=digest))
    serving.run_until_token("s", 6)
    serving.close()
    keeper()
    known = prompt + serving.tokens("s")
    spare.handle(submit("other", known, 2))
    spare.run()
    assert spare.started("other").verdict == "new", "the base model never uses it"
    spare.handle(
        submit(
            "s", known, 12, epoch=2, prompt_count=len(prompt), prefill_start=0, sampling=hot, adapter=digest,
        )
    )  # fmt: skip
    spare.run()
    assert serving.tokens("s") + spare.tokens("s") == calm.tokens("calm")
    assert spare.started("s").recomputed == 1


def test_an_adapter_is_unloaded_when_nobody_uses_it(start_engine: Start, adapters: dict[str, Path]) -> None:
    engine, digest = loaded(start_engine(), adapters), next(iter(adapters))
    engine.handle(submit("s", random_tokens(72, 40), 8, adapter=digest))
    engine.run_until_token("s", 2)
    engine.handle(m.UnloadAdapter(digest))
    engine.run()
    assert len(engine.tokens("s")) == 8 and digest not in engine.engine.adapters
    other = next(known for known in adapters if known != digest)
    engine.handle(m.UnloadAdapter(other))
    assert other not in engine.engine.adapters, "nobody uses it, and no step need come"
    engine.handle(submit("t", random_tokens(73, 40), 8, adapter=digest))
    refused = engine.sent[-1]
    assert isinstance(refused, m.Refused) and refused.code == "bad_adapter"


def test_what_cannot_be_used_is_refused_with_the_reason(start_engine: Start, tiny_dir: Path, tmp_path: Path) -> None:
    linear: dict[str, Any] = {}
    with pytest.raises(BadRequest, match="adapter_config.json"):
        read_adapter(tmp_path, linear)
    engine = start_engine()
    for index, (options, reason) in enumerate([({"use_dora": True}, "use_dora"), ({"bias": "all"}, "bias")]):
        directory = tmp_path / str(index)
        digest = make_adapter(tiny_dir, directory, 3, **options)
        engine.handle(m.LoadAdapter(1, digest, str(directory)))
        assert reason in engine.sent[-1].error
    engine.handle(m.LoadAdapter(2, "00" * 16, str(tmp_path / "0")))
    assert "announced" in engine.sent[-1].error
    engine.handle(m.LoadAdapter(3, "00" * 16, str(tmp_path / "nowhere")))
    assert "nowhere" in engine.sent[-1].error


@pytest.mark.parametrize(
    ("config", "down", "up", "reason"),
    [
        ([], (4, 64), (64, 4), "as PEFT writes them"),
        ({"lora_alpha": "16"}, (4, 64), (64, 4), "as PEFT writes them"),
        ({"lora_alpha": 10**400}, (4, 64), (64, 4), "as PEFT writes them"),
        ({"alpha_pattern": ["q_proj"]}, (4, 64), (64, 4), "as PEFT writes them"),
        ({}, (0, 64), (64, 0), "no matrices of a rank"),
        ({}, (64,), (64,), "no matrices of a rank"),
        ({}, (4, 64, 1), (64, 4), "no matrices of a rank"),
        ({}, (4, 32), (64, 4), "do not fit"),
    ],
)
def test_files_that_are_no_adapters_are_refused_and_end_no_engine(
    tmp_path: Path, config: Any, down: tuple[int, ...], up: tuple[int, ...], reason: str
) -> None:
    config = {"peft_type": "LORA", **config} if isinstance(config, dict) else config
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    weights = {"base_model.model.q.lora_A.weight": torch.ones(down), "base_model.model.q.lora_B.weight": torch.ones(up)}
    save_file(weights, tmp_path / "adapter_model.safetensors")
    with pytest.raises(BadRequest, match=reason):
        Adapters(torch.nn.ModuleDict({"q": torch.nn.Linear(64, 64)})).load(tmp_path, m.adapter_digest(tmp_path))


def test_numbers_that_nothing_computes_with_are_refused_and_end_no_engine(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    shapes = {"base_model.model.q.lora_A.weight": (4, 64), "base_model.model.q.lora_B.weight": (64, 4)}
    weights = {name: torch.ones(shape).to(torch.float8_e4m3fn) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "adapter_model.safetensors")
    with pytest.raises(BadRequest, match="as PEFT writes them"):
        read_adapter(tmp_path, {"q": torch.nn.Linear(64, 64)})
