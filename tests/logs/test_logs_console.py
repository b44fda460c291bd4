"""What real console output holds besides rows."""

import math
from pathlib import Path

import pytest

from grpo_lightning.errors import DataError
from grpo_lightning.logs import open_log

BAR = "\r 10%|█         | {}/200 [00:10<00:10,  3.21s/it]"


def row(reward: float, **more: object) -> str:
    return str({"loss": 0.0, "reward": reward, "reward_std": 0.5, **more})


def log(tmp_path: Path, *lines: str, name: str = "log") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def rewards(reader) -> list[float]:
    return [step.values["reward_mean"] for step in reader]


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("{'loss': 0.1, 'reward': nan}", "reward_mean", math.nan),
        ("{'loss': inf, 'reward': 0.5}", "loss", math.inf),
        ("{'loss': -inf, 'reward': 0.5}", "loss", -math.inf),
        ("{'loss': 'nan', 'reward': '0.5'}", "loss", math.nan),
        ("{'loss': '1e-06', 'reward': ' 0.5 '}", "loss", 1e-6),
        ("{'loss': np.float64(nan), 'reward': np.float32(0.25)}", "reward_mean", 0.25),
        ("{'loss': tensor(0.5, device='cuda:0'), 'reward': tensor(0.25)}", "loss", 0.5),
        ("{'loss': array(0.5, dtype=float32), 'reward': 1}", "loss", 0.5),
        ('{"loss": 0.5, "reward": NaN}', "reward_mean", math.nan),
        ("{\"loss\": 0.5, 'reward': 2}", "reward_mean", 2.0),
        ("\x1b[32m{'loss': 0.5, \x1b[1m'reward'\x1b[0m: 2}\x1b[0m", "reward_mean", 2.0),
        ("2026-01-01 INFO trainer.py:12 {'loss': 0.5, 'reward': 2} done", "reward_mean", 2.0),
        ("{'loss': 1e999, 'reward': 2}", "loss", math.inf),
        (f"{{'loss': {'9' * 5000}, 'reward': 2}}", "loss", math.inf),
        ("{'loss': 0.5, 'rewards/it\\'s/mean': 0.5, 'reward': 2}", "reward_mean", 2.0),
        ("{'loss': 0.5, 'reward': 2, 'kl': None}", "loss", 0.5),
        ("{'loss': 0.5, 'reward': 2, 'rewards/nan/mean': 3.0}", "reward/nan_mean", 3.0),
    ],
)
def test_forms_of_a_number(line, name, value, tmp_path):
    found = next(iter(open_log(log(tmp_path, line)))).values[name]
    assert found == value or (math.isnan(found) and math.isnan(value))


def test_a_value_that_is_none_is_absent(tmp_path):
    values = next(iter(open_log(log(tmp_path, row(1.0, kl=None, entropy="No log"))))).values
    assert "kl" not in values
    assert "entropy" not in values


def test_bars_over_lines_and_several_before_a_row(tmp_path):
    bars = "".join(BAR.format(step) for step in range(1, 11))
    other = "Loading checkpoint shards: 100%|██████████| 2/2 [00:10<00:00,  5.1s/it]"
    lines = [
        other,
        bars,
        BAR.format(10) + "   \r" + row(1.0),
        bars,
        BAR.format(20) + row(2.0),
        BAR.format(30) + "\r" + row(3.0),
    ]
    reader = open_log(log(tmp_path, *lines))
    assert [(step.step, step.values["reward_mean"]) for step in reader] == [(10, 1.0), (20, 2.0), (30, 3.0)]
    assert reader.interval == 10.0


@pytest.mark.parametrize(
    ("before", "between", "given", "steps"),
    [
        ([], [], None, [1, 2, 3, 4]),
        ([], [], 5, [5, 10, 15, 20]),
        (["GRPOConfig(beta=0.0, logging_steps=10, logging_first_step=False)"], [], None, [10, 20, 30, 40]),
        (["resume_from_checkpoint=None, logging_steps=10,"], [], 2, [2, 4, 6, 8]),
        ([], [str({"train_runtime": 100.0, "train_steps_per_second": 0.2})], None, [5, 10, 15, 20]),
        ([BAR.format(n) for n in range(0, 41)], [], None, [10, 20, 30, 40]),
    ],
    ids=["order", "given", "printed arguments", "given before printed", "summary", "all bars first"],
)
def test_steps_of_rows_that_print_none(before, between, given, steps, tmp_path):
    lines = [*before, *(row(float(place)) for place in range(4)), *between]
    assert [step.step for step in open_log(log(tmp_path, *lines), logging_steps=given)] == steps


def test_a_summary_is_no_step_even_with_rewards(tmp_path):
    reader = open_log(log(tmp_path, row(1.0), row(2.0), row(9.0, train_runtime=60.0, kl=1.0)))
    assert rewards(reader) == [1.0, 2.0]


def test_evaluation_joins_the_step_before(tmp_path):
    lines = [row(1.0), str({"eval_loss": 0.1, "eval_reward": 0.7, "eval_runtime": 3.2}), row(2.0)]
    steps = list(open_log(log(tmp_path, *lines)))
    assert [step.step for step in steps] == [1, 2]
    assert steps[0].values["eval_reward_mean"] == 0.7
    assert "eval_reward_mean" not in steps[1].values


def test_an_sft_phase_before_is_left_out(tmp_path):
    sft = [
        str({"loss": 2.0 - step / 10, "grad_norm": 1.0, "learning_rate": 1e-4, "epoch": step / 10}) for step in range(9)
    ]
    reader = open_log(log(tmp_path, *sft, *(row(float(step), epoch=step / 10) for step in range(5))))
    assert [(step.step, step.values["reward_mean"]) for step in reader] == [
        (1, 0.0),
        (2, 1.0),
        (3, 2.0),
        (4, 3.0),
        (5, 4.0),
    ]
    assert any(note.startswith("9 rows with losses but no reward") for note in reader.notes)


def runs_of(*lengths: int) -> list[str]:
    return [
        row(100.0 * run + step, epoch=(step + 1) / 10)
        for run, length in enumerate(lengths, 1)
        for step in range(length)
    ]


@pytest.mark.parametrize(
    ("lengths", "run", "first"),
    [
        ((20, 30), None, 200.0),
        ((20, 30), 1, 100.0),
        ((30, 12), None, 200.0),
        ((50, 2), None, 100.0),
        ((3, 40), None, 200.0),
    ],
    ids=["last", "asked", "shorter last", "false start last", "false start first"],
)
def test_of_several_runs_the_last_real_one_is_read(lengths, run, first, tmp_path):
    reader = open_log(log(tmp_path, *runs_of(*lengths)), run=run)
    assert rewards(reader)[0] == first
    assert reader.runs == 2
    assert any("2 runs in this log" in note for note in reader.notes)
    with pytest.raises(DataError, match="run 3 is not in this log"):
        open_log(log(tmp_path, *runs_of(*lengths)), run=3)


def test_an_evaluation_belongs_to_its_own_run(tmp_path):
    first, second = runs_of(20, 20)[:20], runs_of(20, 20)[20:]
    reader = open_log(
        log(tmp_path, str({"eval_reward": 0.1}), *first, str({"eval_reward": 0.2}), *second, str({"eval_reward": 0.3}))
    )
    assert [(s.step, s.values["eval_reward_mean"]) for s in reader if "eval_reward_mean" in s.values] == [(20, 0.3)]


def test_a_restart_shows_by_its_epoch(tmp_path):
    lines = [row(float(step), epoch=step / 10, num_tokens=100.0 * step) for step in range(1, 11)]
    again = [row(100.0 + step, epoch=step / 10, num_tokens=100.0 * step) for step in range(7, 13)]
    reader = open_log(log(tmp_path, *lines, "Traceback: CUDA out of memory", *again))
    assert [step.step for step in reader] == list(range(1, 13))
    assert rewards(reader) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 107.0, 108.0, 109.0, 110.0, 111.0, 112.0]


def test_a_restart_shows_by_its_bar(tmp_path):
    lines = [BAR.format(step) + "\r" + row(float(step)) for step in (*range(1, 11), *range(7, 13))]
    reader = open_log(log(tmp_path, *lines))
    assert [step.step for step in reader] == list(range(1, 13))
    assert reader.runs == 1


def test_an_overlong_line_is_skipped_and_counted(tmp_path):
    path = tmp_path / "log"
    with path.open("w") as file:
        file.write(row(1.0) + "\n" + row(2.0) + "\n")
        for _ in range(20):
            file.write("x" * 1_000_000)
        file.write("\n" + row(3.0) + "\n")
    reader = open_log(path)
    assert rewards(reader) == [1.0, 2.0, 3.0]
    assert reader.unread == 1


def test_a_cut_row_is_counted_and_said(tmp_path):
    path = log(tmp_path, row(1.0), row(2.0))
    path.write_text(path.read_text() + row(3.0)[:30])
    reader = open_log(path)
    assert rewards(reader) == [1.0, 2.0]
    assert reader.unread == 1
    assert "the last line is cut, or still being written" in reader.notes


def test_settings_are_no_rows(tmp_path):
    settings = ["{'learning_rate': 1e-06, 'beta': 0.04}", "{'r': 16, 'lora_alpha': 32}", "{'epoch': 1}"]
    assert rewards(open_log(log(tmp_path, *settings, row(1.0), *settings, row(2.0)))) == [1.0, 2.0]


OPENRLHF = [
    f"(PPOTrainer pid=9) 2026-01-01 INFO ppo_trainer.py:80 - ✨ Global step {step}: "
    + str(
        {
            "policy_loss": 0.01,
            "actor_lr": 1e-6,
            "kl": 0.02,
            "reward": 0.1 * step,
            "group_reward_std": 0.3,
            "response_length": 200.0,
            "response_clip_ratio": 0.125,
            "entropy_loss": 0.8,
            "vllm_kl": 0.001,
            "ppo_kl": 0.5,
        }
    )
    for step in (1, 2, 3)
]


def test_openrlhf(tmp_path):
    reader = open_log(log(tmp_path, "Episode [1/1]:   0%|  | 0/8 [00:00<?, ?it/s]", *OPENRLHF))
    steps = list(reader)
    assert (reader.format, reader.trainer) == ("openrlhf", "openrlhf")
    assert [step.step for step in steps] == [1, 2, 3]
    assert steps[1].values == {
        "policy_loss": 0.01,
        "lr": 1e-6,
        "kl": 0.02,
        "reward_mean": 0.2,
        "group_reward_std": 0.3,
        "response_length_mean": 200.0,
        "truncated_fraction": 0.125,
        "entropy": 0.8,
        "rollout_mismatch_kl": 0.001,
    }
    assert not reader.unknown_keys


NEMO = """
========================= Step {0}/100 =========================
▶ Preparing batch...
📊 Training Results:
  • Loss: 0.0{0}00
  • Generation KL Error: 0.0004
  • Avg Reward: 0.5{0}00
  • Mean Generation Length: 310.5000

⏱️  Timing:
  • Total step time: 12.34s
  • generation: 6.10s (49.4%)
"""


def test_nemo_rl(tmp_path):
    reader = open_log(log(tmp_path, *(NEMO.format(step) for step in (1, 2, 3))))
    steps = list(reader)
    assert (reader.format, reader.trainer) == ("nemo-rl", "nemo-rl")
    assert [step.step for step in steps] == [1, 2, 3]
    assert steps[2].values == {
        "loss": 0.03,
        "rollout_mismatch_kl": 0.0004,
        "reward_mean": 0.53,
        "response_length_mean": 310.5,
        "step_seconds": 12.34,
    }


def test_verl_evaluation_alone_and_group_size_one(tmp_path):
    lines = ["step:0 - val/test_score/openai/gsm8k:0.25 - val/test_score/math:0.75"]
    lines += [
        f"step:{step} - training/global_step:{step} - critic/score/mean:0.{step} - critic/advantages/mean:0.{step} - "
        f"critic/advantages/max:0.5 - critic/advantages/min:-0.9 - actor/ppo_kl:9.0 - actor/kl_loss:0.1"
        for step in (1, 2)
    ]
    steps = list(open_log(log(tmp_path, *lines)))
    assert [(step.step, step.values) for step in steps] == [
        (0, {"eval_accuracy": 0.5}),
        (1, {"reward_mean": 0.1, "advantage_mean": 0.1, "advantage_abs_max": 0.9, "kl": 0.1}),
        (2, {"reward_mean": 0.2, "advantage_mean": 0.2, "advantage_abs_max": 0.9, "kl": 0.1}),
    ]


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"rewards/f/mean": 1.0, "rewards/f/std": 0.5, "frac_reward_zero_std": 0.5}, "reward_std"),
        ({"rewards/f/mean": 1.0, "rewards/f/std": 0.9, "frac_reward_zero_std": 0.5}, "group_reward_std"),
        ({"rewards/f/mean": 0.5, "rewards/f/std": 0.25, "frac_reward_zero_std": 0.5}, "reward_std"),
        ({"rewards/f/mean": 1.0, "rewards/g/mean": 0.0, "frac_reward_zero_std": 0.5}, "reward_std"),
        ({"rewards/f": 1.0, "completion_length": 50.0}, "group_reward_std"),
        ({}, "reward_std"),
    ],
    ids=[
        "as the function's",
        "below the function's",
        "as the function's times its weight",
        "two functions",
        "old names",
        "unknown",
    ],
)
def test_whose_spread_reward_std_is(more, name, tmp_path):
    values = next(iter(open_log(log(tmp_path, *(row(1.0, **more) for _ in range(5)))))).values
    assert values[name] == 0.5
    assert ("reward_std" in values) != ("group_reward_std" in values)
