"""The paper's studies at the size of a small machine, a module each: `python -m bench.studies.dense_and_moe --help`.

Each trains what it needs into a work folder (a stopped study goes on where it was), and leaves its table, its curves
and a picture in bench/results/study-*.json and .png, from which bench.report fills README.md and docs/.
"""
