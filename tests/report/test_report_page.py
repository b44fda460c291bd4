"""The page: self-contained, escaped, small enough, written whole."""

from __future__ import annotations

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import HOSTILE, evidence_row, hostile_run, make_run

from grpo_lightning.errors import UsageError
from grpo_lightning.health import Step, build_baseline
from grpo_lightning.report import examine_log, examine_run, render_report, write_report
from grpo_lightning.report.page import LARGEST
from grpo_lightning.report.rows import view_evidence
from grpo_lightning.report.signals import ACCEPTED
from grpo_lightning.sinks import EventRow, StepRow

TAGS = {
    "html", "head", "meta", "title", "style", "body", "a", "header", "div", "span", "h1", "h2", "h3", "h4", "p", "nav", "main",
    "section", "dl", "dt", "dd", "aside", "article", "figure", "figcaption", "svg", "g", "line", "text", "polyline", "polygon",
    "circle", "path", "rect", "table", "thead", "tbody", "tr", "th", "td", "ul", "ol", "li", "details", "summary", "pre", "code",
    "b", "label", "input", "footer", "script", "em", "strong", "br", "hr", "blockquote",
}  # fmt: skip


class Page(HTMLParser):
    """Elements, attributes, texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        (self.scripts if self._inside == "script" else self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return render_report(examine_run(hostile_run(tmp_path_factory.mktemp("runs"))))


def test_the_three_pages_say_what_is_known(tmp_path: Path) -> None:
    rows = [evidence_row(i, g) for i in range(3) for g in range(4)]
    text = render_report(examine_run(make_run(tmp_path, evidence=rows)))
    page = Page(text)
    ids = [attributes.get("id") for tag, attributes in page.elements if tag == "section"]
    assert ids == ["overview", "health", "diagnosis"]
    for said in (
        "tidy-run", "what it is for", "unhealthy", "paused", "kl_runaway", "KL is 20 times its usual.", "Look at the reward.",
        "median ± 2 robust deviations", "nothing found", "step 60", "acknowledge",
        "step-0000050.ckpt", "What is 1 + 2?", "the answer is 4", "largest spread", "resample", "4 groups sampled again", "cut",
    ):  # fmt: skip
        assert said in page.text, said


def test_every_signal_has_a_chart_with_title_unit_and_reading(tmp_path: Path) -> None:
    found = examine_run(make_run(tmp_path))
    page = Page(render_report(found))
    drawn = {attributes["data-name"] for tag, attributes in page.elements if tag == "figure"}
    assert drawn == {name for name in found.run.signals if name != "nonfinite_count"}  # that one never changes
    assert "nonfinite_count" in page.text
    assert "Levels differ a thousandfold between viable runs; its speed and stairs say more." in page.text
    assert "nats" in page.text


def test_alerts_are_marked_in_the_charts_with_their_onset(tmp_path: Path) -> None:
    text = render_report(examine_run(make_run(tmp_path)))
    assert text.count('<g class="mark critical own"><rect') >= 1
    assert "kl_runaway at step 65, began about 60: KL is 20 times its usual." in text
    assert '<g class="mark critical other">' in text
    assert '<g class="mark recovery">' in text


def test_restarts_are_marked(tmp_path: Path) -> None:
    directory = make_run(tmp_path, onset=None)
    with directory.journal() as journal:
        journal.start_segment(from_step=80, time=2000.0)
    text = render_report(examine_run(directory))
    assert '<g class="mark segment">' in text
    assert "restart: segment 2" in text


def test_a_change_on_purpose_is_marked_in_every_chart(tmp_path: Path) -> None:
    directory = make_run(tmp_path, onset=None)
    with directory.journal() as journal:
        segment = journal.start_segment(from_step=80, time=2000.0)
        for step in range(81, 101):
            row = {"reward_mean": step / 100, "kl": 1 / step}
            journal.write_step(
                StepRow(run_id=directory.run_id, segment=segment, step=step, time=2000.0 + step, values=row)
            )
        payload = {"levels": ["data"], "note": "two thousand <more> rows", "message": "accepted: …"}
        journal.write_event(
            EventRow(
                run_id=directory.run_id, segment=segment, step=80, time=2000.0, kind="note", name=ACCEPTED, payload=payload
            )
        )  # fmt: skip
        for step in range(40, 80):  # many other notes crowd it out nowhere
            event = EventRow(
                run_id=directory.run_id, segment=1, step=step, time=1.0, kind="note", name="n", payload={"message": str(step)}
            )  # fmt: skip
            journal.write_event(event)
    text = render_report(examine_run(directory))
    charts = text.count("<figure")
    assert charts > 5
    assert text.count('<g class="mark accepted">') == charts
    assert "from step 80 on, changed on purpose: data: two thousand &lt;more&gt; rows" in text
    assert "from a change on purpose on" in text


def test_a_baseline_is_the_ruler(tmp_path: Path) -> None:
    baseline = build_baseline({"old <b>run</b>": [Step(step=i, values={"kl": 0.05 + i / 1e4}) for i in range(1, 81)]})
    text = render_report(examine_run(make_run(tmp_path), baseline=baseline))
    assert "the baseline of old &lt;b&gt;run&lt;/b&gt;: level ± 2 robust deviations" in text


def test_hostile_text_makes_no_element_and_no_attribute(hostile: str) -> None:
    page = Page(hostile)
    assert {tag for tag, _ in page.elements} <= TAGS
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")], tag
        assert "style" not in attributes, tag
        assert attributes.get("href", "#").startswith("#"), tag  # type: ignore[union-attr]
        assert not set(attributes) & {"src", "srcdoc", "action", "formaction", "data", "xlink:href"}, tag
    assert len(page.scripts) == 2  # the numbers and our own
    assert "pwned" not in "".join(page.scripts)


def test_hostile_text_is_shown_as_text(hostile: str) -> None:
    page = Page(hostile)
    for text in HOSTILE[:7]:
        assert text in page.text
    assert "49" not in re.findall(r"\b49\b", page.text)  # {{ 7 * 7 }} is not computed


def test_controls_and_directions_are_written_out(hostile: str) -> None:
    assert "\\x1b[31mred" in hostile
    assert "\\u202egnp.exe \\x00" in hostile
    assert not [c for c in hostile if c in "\x1b\x00\u202e"]


def test_the_page_needs_no_network(hostile: str) -> None:
    own = re.sub(r"<script.*?</script>", "", hostile, flags=re.DOTALL)
    assert not re.search(r"""(src|href|url|action)\s*[=(]\s*["']?(https?:|//|data:)""", own)
    assert "@import" not in hostile
    assert "default-src 'none'" in hostile


def test_numbers_inside_the_script_are_json_and_cannot_end_it(hostile: str) -> None:
    content = re.search(r'<script type="application/json" id="data">(.*?)</script>', hostile, flags=re.DOTALL)
    assert content is not None
    data = json.loads(content[1])
    assert "<" not in content[1]
    assert all(len(one["s"]) == len(one["v"]) for one in data.values())


def big_log(steps: int, signals: int) -> list[Step]:
    noise = random.Random(1)
    names = [f"signal_{i:04d}" for i in range(signals)]
    return [Step(step=i, values={name: noise.random() for name in names}) for i in range(1, steps + 1)]


def test_many_long_series_are_drawn_coarser() -> None:
    text = render_report(examine_log("big.csv", big_log(1500, 300)))
    assert len(text.encode()) <= LARGEST


def test_more_signals_than_can_be_drawn_are_said() -> None:
    text = render_report(examine_log("wide.csv", big_log(20, 450)))
    assert "50 more signals are not drawn." in text
    assert text.count("<figure") == 400


def test_much_evidence_is_cut_and_said(tmp_path: Path) -> None:
    rows = [evidence_row(i, g, text="long " * 600) for i in range(400) for g in range(8)]
    found = examine_run(make_run(tmp_path, evidence=rows))
    text = render_report(found)
    assert len(text.encode()) <= LARGEST
    assert re.search(r"\d+ more groups are in the file", text)
    assert "900 characters left out" in text
    (file,) = view_evidence(found.evidence, budget=25_000)
    assert (len(file.groups), file.more) == (1, 399)  # 8 x 2,500 and the prompt leave no room for a second


def test_a_text_without_end_does_not_fill_the_page(tmp_path: Path) -> None:
    text = render_report(examine_run(make_run(tmp_path, name="n" * 1_000_000, description="d" * 3_000_000)))
    assert len(text.encode()) < 1_000_000
    assert "(3,000,000 characters)" in text


def test_the_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine_run(make_run(tmp_path))
    target = tmp_path / "r.html"
    target.write_text("the old one")

    def full(self: Path, text: str, **settings: object) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(UsageError, match=r"Can't write the report .*r\.html: No space left on device"):
            write_report(found, target)
    assert target.read_text() == "the old one"
    assert [path.name for path in tmp_path.glob(".*")] == []
    assert write_report(found, target) == target
    assert target.read_text().endswith("</html>")


def test_a_folder_that_is_missing_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory"):
        write_report(examine_run(make_run(tmp_path)), tmp_path / "no" / "r.html")


def test_a_run_with_one_step_and_numbers_that_are_none_has_a_page() -> None:
    rows = [Step(step=1, values={"loss": float("nan"), "kl": float("inf"), "reward_mean": 1e308, "lr": -1e308})]
    assert "never finite" in render_report(examine_log("one.csv", rows))
