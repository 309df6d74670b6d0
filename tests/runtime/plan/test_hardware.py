"""Hardware files: every constant has a unit and a source; damage is named."""

from pathlib import Path

import pytest

from optimus_compiler.mesh import Mesh
from optimus_compiler.runtime.plan.estimate import seconds_of
from optimus_compiler.runtime.plan.hardware import Constant, load_hardware
from optimus_compiler.runtime.plan.work import Transfer

BUNDLE = Path(__file__).parents[3] / "optimus_compiler" / "hardware"


@pytest.mark.parametrize("name", ["aurora", "h200"])
def test_every_constant_has_a_source(name: str) -> None:
    hardware = load_hardware(name)
    constants = [value for _, value in hardware if isinstance(value, Constant)]
    constants += [c for link in hardware.links for c in (link.bandwidth, link.latency)]
    assert len(constants) >= 13
    assert all(len(constant.source) > 5 for constant in constants)
    assert [link.within for link in hardware.links] == sorted(link.within for link in hardware.links)


def test_units_become_bytes_and_seconds() -> None:
    aurora = load_hardware("aurora")
    assert aurora.memory.si == 64 * 2**30
    assert aurora.matmul.si == 207e12
    assert aurora.launch.si == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('unit = "GiB"', 'unit = "GB"', r"mine\.toml: memory\.unit: .*'GB' is no unit here"),
        ("devices_per_node = 12", "", r"mine\.toml: devices_per_node: Field required"),
        ("value = 64,", "value = -1,", r"mine\.toml: memory\.value: .*greater than 0"),
        ("name = ", "nme = ", r"mine\.toml: "),
        ("{value = 64", "value = 64", r"mine\.toml is not valid TOML"),
    ],
)
def test_damage_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text((BUNDLE / "aurora.toml").read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        load_hardware(str(file))


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="neither a file nor a known machine: choose one of aurora, h200"):
        load_hardware("frontier")


def test_collectives_cross_link_after_link() -> None:
    """1 GB over 24 ranks of two nodes: halves between two tiles, sixths in a node, halves of a twelfth beyond."""
    aurora = load_hardware("aurora")
    pair, node, group, _ = aurora.links
    expected = (
        (0.5 * 1e9 / pair.bandwidth.si + pair.latency.si)
        + (5 / 6 * 0.5e9 / node.bandwidth.si + 3 * node.latency.si)
        + (0.5 * 1e9 / 12 / group.bandwidth.si + group.latency.si)
    )
    mesh = Mesh.abstract(dp=24)
    gather = seconds_of(Transfer("all_gather", "dp", 10**9), mesh, aurora)
    assert gather == pytest.approx(expected)
    assert seconds_of(Transfer("all_reduce", "dp", 10**9), mesh, aurora) == pytest.approx(2 * expected)
    assert seconds_of(Transfer("all_gather", "ep", 10**9), mesh, aurora) == 0
    # a node each: every rank has only its own share of the node's ports
    alone = seconds_of(Transfer("all_gather", "dp", 10**9), Mesh.abstract(dp=2, ep=12), aurora)
    assert alone == pytest.approx(0.5e9 / group.bandwidth.si + group.latency.si)
