"""The command line that the studies share."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.studies.corpus import Corpus, make_corpus
from bench.tables import RESULTS

PATIENCE = 1800  # seconds for processes that measure: they compile first, and the machine may be busy


@dataclass(frozen=True)
class Options:
    """What a study is run with."""

    corpus: Corpus
    work: Path
    results: Path
    size: float

    def scaled(self, count: int) -> int:
        """So many steps, rounds or questions at full size, at least four."""
        return max(4, round(count * self.size))


def parse_options(description: str) -> Options:
    """Reads the command line, and makes the data that the study trains on."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="folder of documents; default: the sources of Python's library")
    parser.add_argument("--work", type=Path, default=Path("study-runs"), help="folder for data and runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the table, curves and picture")
    parser.add_argument("--size", type=float, default=1.0, help="share of the steps, e.g. 0.01 to try it")
    given = parser.parse_args()
    torch.set_num_threads(1)  # as each training has
    return Options(make_corpus(given.work / "corpus", given.corpus), given.work, given.results, given.size)
