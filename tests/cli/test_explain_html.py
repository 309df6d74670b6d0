"""The page of `optimus explain --html`: complete, without network, and readable in a browser."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.tiny_run import CONFIG

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def html_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from optimus_compiler.cli.main import main

    folder = tmp_path_factory.mktemp("page")
    text = CONFIG.replace("global_batch_size = 4\n", "sequence_length = 16\n")
    (folder / "run.toml").write_text(text + "\n[mesh]\npp = 2\ndp = 2\nep = 2\n")
    assert main(["explain", str(folder / "run.toml"), "--html", str(folder / "page.html")]) == 0
    return folder / "page.html"


def test_the_page_holds_everything_and_asks_for_nothing(html_page: Path) -> None:
    text = html_page.read_text()
    for words in ("FuseSparseMoE", "ExpertParallel", "SplitPipeline", "ShardOptimizer", "grouped_mlp", "pp rank 1"):
        assert words in text
    assert text.count("<rect ") == 2 * 2 * 2 + 2 * 4  # forwards and backwards of two ranks, four parts of memory each
    assert "divided on dimension 0" in text
    assert "copied, state divided" in text
    assert "micro-batch 1, backward" in text
    assert not re.search(r"(?:src|href)=|https?://(?!www\.w3\.org)|@import|url\(", text)
    for tag in ("details", "table", "svg", "pre"):
        assert text.count(f"<{tag}") == text.count(f"</{tag}>")


def test_what_a_pass_wrote_is_marked(html_page: Path) -> None:
    fused = html_page.read_text().split("<b>FuseSparseMoE</b>")[1].split("<b>")[0]
    new = re.findall(r'<span class="new">(.*?)</span>', fused)
    assert any("optimus.grouped_mlp" in line for line in new)
    assert not any("linear" in line for line in new)


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_a_browser_shows_the_page(html_page: Path, tmp_path: Path) -> None:
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shot = tmp_path / "page.png"
    subprocess.run([BROWSER, *options, f"--screenshot={shot}", "--window-size=1200,2000", html_page.as_uri()],
                   check=True, capture_output=True, timeout=120)  # fmt: skip
    assert shot.read_bytes().startswith(b"\x89PNG")
    assert shot.stat().st_size > 20_000
    dumped = subprocess.run([BROWSER, *options, "--dump-dom", html_page.as_uri()],
                            check=True, capture_output=True, text=True, timeout=120).stdout  # fmt: skip
    for words in ("<h2>Pipeline</h2>", 'id="timeline"', 'id="memory"', "FuseSparseMoE"):
        assert words in dumped


def test_an_unknown_machine_leaves_no_page(optimus: Run, html_page: Path, tmp_path: Path) -> None:
    code, _, err = optimus(
        "explain", html_page.parent / "run.toml", "--html", tmp_path / "p.html", "--hardware", "moon"
    )
    assert code == 2
    assert "neither a file nor a known machine" in err
    assert not (tmp_path / "p.html").exists()
