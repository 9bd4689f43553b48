"""The benchmark's floor is the one that the project's goals were set with, and its reference agrees with the specification."""

import pytest

from flashmap.bench import points
from flashmap.bench.points import GEOMETRY, GQA_8_1, GQA_32_8, MLA_16, MLA_128, Point

# µs, in GEOMETRY's order: the floor column of the H200 baseline. Chain and tree have the same.
FLOORS = {
    GQA_32_8: (0.99, 7.82, 7.88, 44.09, 62.51, 62.58, 63.07, 125.46),
    GQA_8_1: (0.13, 0.98, 0.99, 11.02, 7.82, 7.84, 7.95, 15.74),
    MLA_16: (0.31, 2.23, 6.22, 93.70, 49.74, 17.83, 49.78, 36.19),
    MLA_128: (1.47, 11.70, 49.78, 749.60, 397.89, 93.63, 398.25, 187.31),
}


@pytest.mark.parametrize("shape", FLOORS, ids=lambda s: s.name)
def test_floor_is_the_baselines(shape):
    for geometry, floor in zip(GEOMETRY, FLOORS[shape], strict=True):
        for tree in (False, True):
            assert Point(shape, *geometry, tree).floor_us == pytest.approx(floor, abs=0.006)


def test_the_table_has_64_points_with_labels_of_their_own():
    assert len(points.TABLE) == 64 == len({p.label for p in points.TABLE})
    assert len(points.select("gqa")) == len(points.select("all:mla")) == 32
    assert [p.tree for p in points.select(r"gqa8/1 bs1 L17 ctx8192")] == [False, True]
    with pytest.raises(ValueError, match="matches none"):
        points.select("nothing like this")


def test_features_compare_points_that_differ():
    for rows in points.features().values():
        for row in rows:
            assert row.base != row.other and row.base.label != row.other.label


def test_ragged_lengths_keep_the_number_of_tokens():
    ragged = Point(GQA_32_8, 32, 4, 4096, spread="ragged")
    assert sum(ragged.query_lens) == 32 * 4 and len(set(ragged.query_lens)) > 3


@pytest.mark.parametrize("spread", ["uniform", "ragged", "one-long"])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("shape", [GQA_8_1, MLA_16], ids=lambda s: s.name)
def test_reference_agrees_with_the_specification(shape, tree, spread):
    pytest.importorskip("torch")
    pytest.importorskip("flashmap.core")
    from flashmap.bench.peers.ours import Ours
    from flashmap.bench.problem import Problem

    problem = Problem(Point(shape, 2, 4, 20, tree, page=16, spread=spread), device="cpu", layers=2)
    reference = problem.reference(1)
    for draft in ("cache", "separate"):
        for layout in ("qlen", "full", "packed") if tree else ("qlen",):
            if tree and layout == "qlen" and spread == "ragged":
                assert problem.tree.shape[1] == problem.max_query_len
            out = Ours("reference", draft, layout).bind(problem)(1)
            assert (out.float() - reference).norm() / reference.norm() < 0.01


@pytest.mark.parametrize("name", points.SETS)
def test_sets_have_no_point_twice(name):
    assert len({p.label for p in points.SETS[name]}) == len(points.SETS[name])


def test_sweeps_go_along_every_axis():
    """What the project's issue asks for: batch and L from 1 to 64, context from 1k to 128k, these heads and dimensions."""
    for axis, ends in (("bs", (1, 64)), ("length", (1, 64)), ("ctx", (1024, 131072)), ("page", (1, 64)), ("kv", ("bf16", "fp8"))):
        values = sorted({getattr(p, axis) for p in points.SWEEPS})
        assert (values[0], values[-1]) == ends
    assert {p.shape.name for p in points.SWEEPS} >= {"gqa32/8", "gqa28/4", "gqa64/8", "gqa8/1", "mla16", "mla32", "mla128"}
    assert {p.shape.head_dim for p in points.SWEEPS} == {64, 128, 256, 576}
    assert {p.spread for p in points.SWEEPS} == {"uniform", "ragged"} and {p.tree for p in points.SWEEPS} == {True, False}


def test_tune_measures_every_class_at_several_lengths():
    lengths = {}
    for p in points.TUNE:
        lengths.setdefault((p.shape, p.kv, p.mask, p.bs, p.length), set()).add(p.ctx)
    assert len(lengths) > 100 and all(len(found) > 1 for found in lengths.values())


def test_what_a_call_moves_and_its_rows():
    point = Point(GQA_32_8, 2, 4, 100)
    assert point.rows == 16
    assert point.kv_bytes == 2 * 104 * 8 * 256 * 2 and point.moved_bytes == point.kv_bytes + 2 * 4 * 32 * 256 * 2


def test_a_shapes_name_says_what_it_is():
    assert points.Shape.named("gqa64/8d256") == points.Shape("gqa64/8d256", 64, 8, 256, 256)
    assert points.Shape.named("mla32") == points.Shape("mla32", 32, 1, 576, 512, latent=True)
    for name in ("gqa33/8", "32/8", "gqa8/0", "mla", "gqa32/8d", "gqa32/8 "):
        with pytest.raises(ValueError, match="shape"):
            points.Shape.named(name)
