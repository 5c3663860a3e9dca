"""Pictures of plans: what they show, and that nothing covers anything else.

Covers: drjax._drawing.draw, drjax._drawing.columns, drjax._drawing.positions.
"""

import itertools
import sys
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest

import drjax
from drjax._drawing import draw
from drjax._drawing.columns import SHOWN
from drjax._drawing.positions import Box, Picture, layout
from tests.helpers import levels
from tests.helpers.run_python import run

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

N = 8
DATA = jnp.ones((N, 5, 3))
MODEL = jnp.ones(3)


@drjax.program(clients=N)
def step(model, data):
    def work(model, x):
        return model - 0.1 * jax.grad(lambda m: jnp.mean((x @ m) ** 2))(model)

    return drjax.reduce_mean(drjax.map_fn(work, (drjax.broadcast(model), data)))


@drjax.program(clients=N)
def two_rounds(model, data):
    mean = drjax.reduce_mean(drjax.map_fn(lambda x: x.mean(0), data))

    def centered(mean, model, x):
        return x @ model - mean @ model

    sent = drjax.broadcast((mean, model))
    slices = drjax.map_fn(centered, (*sent, data))
    return drjax.reduce_sum(slices), drjax.reduce_max(slices)


@drjax.program(clients=N)
def scanned(model, data):
    both = lambda m, _: (step(m, data), jnp.sum(m**2))
    return jax.lax.scan(both, model, None, length=10)


@drjax.program(clients=N)
def branching(model, data):
    model = jax.lax.while_loop(lambda m: m[0] > 0.5, lambda m: step(m, data), model)
    again = lambda m: step(m, data)
    return jax.lax.cond(model[0] > 0, again, lambda m: m, model)


@drjax.program(clients=N)
def tree(params, data):
    def work(params, x):
        return jax.tree.map(lambda p: p + x.sum(), params)

    return drjax.reduce_mean(drjax.map_fn(work, (drjax.broadcast(params), data)))


@drjax.program(clients=N)
def scattering(whole, data):
    return drjax.reduce_max(drjax.map_fn(jnp.add, (drjax.scatter(whole), data)))


PARAMS = {
    f"layer_with_a_long_name_{i}": np.ones((i + 1, 4), np.float32) for i in range(9)
}


def total(fn):
    return lambda model, data: sum(x.sum() for x in jax.tree.leaves(fn(model, data)))


PLANS = {
    "step": drjax.make_plan(step)(MODEL, DATA),
    "gradient": drjax.make_plan(jax.grad(total(step)))(MODEL, DATA),
    "two rounds": drjax.make_plan(two_rounds)(MODEL, DATA),
    "tree": drjax.make_plan(tree)(PARAMS, DATA),
    "scan": drjax.make_plan(scanned)(MODEL, DATA),
    "gradient of scan": drjax.make_plan(jax.grad(total(scanned)))(MODEL, DATA),
    "loops": drjax.make_plan(branching)(MODEL, DATA),
    "scatter": drjax.make_plan(scattering)(jnp.cos(jnp.arange(N)), DATA),
    "levels": drjax.make_plan(jax.grad(levels.loss))(levels.MODEL, levels.X),
    "loops in levels": drjax.make_plan(levels.steps)(levels.MODEL, levels.X),
    "three levels": drjax.make_plan(levels.three)(levels.X.reshape(2, 3, 2, 2)),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
CONTAINERS = ("band", "frame")


def texts(picture: Picture, kind: str) -> list[str]:
    return ["\n".join(box.lines) for box in picture.boxes if box.kind == kind]


def covers(one: Box, two: Box) -> bool:
    return (
        one.x < two.x + two.width
        and two.x < one.x + one.width
        and one.y < two.y + two.height
        and two.y < one.y + one.height
    )


@every_plan
def test_one_arrow_a_message(plan):
    picture = layout(plan)
    for number, a_round in enumerate(plan.rounds, 1):
        sides = {
            "down": len(a_round.broadcast) + len(a_round.scatter),
            "up": len(a_round.reduces),
        }
        for kind, messages in sides.items():
            matches = lambda x, k=kind, i=number: (
                (x.kind, x.location) == (k, f"round {i}")
            )
            shown = messages if messages <= SHOWN + 1 else SHOWN + 1
            assert sum(map(matches, picture.arrows)) == shown
            assert sum(map(matches, picture.boxes)) == shown


@every_plan
def test_boxes_do_not_cover_each_other(plan):
    boxes = [b for b in layout(plan).boxes if b.kind not in CONTAINERS]
    for one, two in itertools.combinations(boxes, 2):
        assert not covers(one, two), (one, two)


@every_plan
def test_arrows_cross_no_other_message(plan):
    picture = layout(plan)
    messages = [b for b in picture.boxes if b.kind in ("down", "up")]
    for arrow in picture.arrows:
        if arrow.kind in ("time", "key down", "key up"):
            continue
        crossed = [
            box
            for box in messages
            if any(
                covers(box, Box("", min(a, c), min(b, d), abs(a - c), abs(b - d)))
                for (a, b), (c, d) in itertools.pairwise(arrow.points)
            )
        ]
        assert len(crossed) == (arrow.kind in ("down", "up"))


@every_plan
def test_an_arrow_enters_a_message_as_far_inside_as_it_leaves_it(plan):
    picture = layout(plan)
    for kind in ("down", "up"):
        boxes = [x for x in picture.boxes if x.kind == kind]
        arrows = [x for x in picture.arrows if x.kind == kind]
        for box, arrow in zip(boxes, arrows, strict=True):
            places = [x for x, _ in arrow.points]
            before, after = min(places) - box.x, box.x + box.width - max(places)
            assert 0 < before == pytest.approx(after)


@every_plan
def test_texts_fit_into_their_boxes_and_the_picture(plan):
    picture = layout(plan)
    with matplotlib.rc_context(draw.SETTINGS):
        figure = draw.figure_of(picture)
        figure.set_dpi(72)
        figure.draw_without_rendering()
        result = [t.get_window_extent() for t in figure.axes[0].texts if t.get_text()]
    boxes = iter(result)
    for box in picture.boxes:
        assert 0 <= box.x and box.x + box.width <= picture.width
        assert 0 <= box.y and box.y + box.height <= picture.height
        for line in box.lines:
            if line:
                text = next(boxes)
                assert box.x <= text.x0 and text.x1 <= box.x + box.width, line
                assert box.y <= picture.height - text.y1 + 1
                assert picture.height - text.y0 <= box.y + box.height + 1


def test_labels_say_what_is_sent_and_where_it_is_computed():
    picture = layout(PLANS["two rounds"])
    assert texts(picture, "down") == [
        "mean(function)\nfloat32[3]  12 B",
        "model\nfloat32[3]  12 B",
    ]
    assert texts(picture, "up")[1:] == [
        "sum of centered\nfloat32[5]  20 B",
        "max of centered\nfloat32[5]  20 B",
    ]
    assert texts(picture, "local")[-1] == "centered"
    labels = texts(picture, "label")
    assert "round 2\n↓ 24 B  ↑ 40 B a group" in labels
    assert {"inputs", "outputs", "server", "group 0", "group 1", "group 7"} <= {*labels}
    assert "… 8 in all" in labels
    assert texts(picture, "value")[0] == "model: float32[3]"
    assert texts(picture, "value").count("data: float32[5,3]") == 3


def test_a_scatter_says_which_slice():
    assert "slice i of whole" in texts(layout(PLANS["scatter"]), "down")[0]


def test_of_many_values_the_largest_are_shown():
    picture = layout(PLANS["tree"])
    down = texts(picture, "down")
    assert len(down) == SHOWN + 1
    assert down[-1] == "+ 5 more\n240 B in all"
    assert "float32[9,4]  144 B" in down[-2]
    assert texts(picture, "value")[0].endswith("+ 5 more, 240 B in all")


def test_loops_are_frames_around_their_rounds():
    picture = layout(PLANS["gradient of scan"])
    forward, backward = [b for b in picture.boxes if b.kind == "frame"]
    assert forward.lines[0].endswith("scan, 10 steps")
    assert forward.lines[1] == "carries model"
    assert backward.lines[0].endswith("scan, 10 steps, last to first")
    assert not covers(forward, backward)
    for box in (b for b in picture.boxes if "scan" in b.location and b.kind != "value"):
        assert covers(box, forward) != covers(box, backward)
    frames = texts(layout(PLANS["loops"]), "frame")
    for words in ("while", "condition", "body", "cond", "branch 0", "branch 1"):
        assert any(words in frame for frame in frames)


def test_inner_levels_are_in_the_boxes_of_groups():
    local = texts(layout(PLANS["levels"]), "local")[0]
    assert "over groups:3, inside\n  round 1  ↓ 16 B  ↑ 4 B\n  round 2  " in local
    local = texts(layout(PLANS["loops in levels"]), "local")[-1]
    assert "over groups:3, inside" in local and "  scan of rounds, 2 steps" in local
    local = texts(layout(PLANS["three levels"]), "local")[0]
    assert "over b:3, inside\n  round 1  ↑ 8 B\n    over c:2, inside" in local


def test_kept_values_are_shown_in_their_groups():
    double = drjax.program(clients=4)(lambda x: drjax.map_fn(jnp.sin, x))
    plan = drjax.make_plan(double)(jnp.ones(4))
    kept = [t for t in texts(layout(plan), "local") if "keeps" in t]
    assert kept and "float32" in kept[0]


def test_a_picture_grows_with_its_rounds():
    one, two = layout(PLANS["step"]), layout(PLANS["two rounds"])
    assert two.width > one.width


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_all_groups_are_drawn_if_few(n):
    plan = drjax.make_plan(drjax.program(clients=n)(drjax.reduce_sum))(jnp.ones(n))
    picture = layout(plan)
    groups = [t for t in texts(picture, "label") if t.startswith("group")]
    assert len(groups) == min(n, 3) and groups[-1] == f"group {n - 1}"
    assert any("in all" in t for t in texts(picture, "label")) == (n > 3)


def test_a_plan_without_groups_is_drawn():
    picture = layout(drjax.make_plan(jnp.sin)(1.0))
    assert "server computes" in texts(picture, "server")[0]
    assert not [b for b in picture.boxes if b.kind == "local"]


@pytest.mark.sampled
@every_plan
def test_files_are_written(plan, tmp_path):
    plan.draw(tmp_path / "new" / "plan.svg")
    root = ElementTree.parse(tmp_path / "new" / "plan.svg").getroot()
    assert root.tag.endswith("svg")
    plan.draw(str(tmp_path / "plan.PNG"))
    assert (tmp_path / "plan.PNG").read_bytes().startswith(b"\x89PNG")


@every_plan
def test_lines_go_to_every_group(plan):
    picture = layout(plan)
    for way in ("down", "up"):
        of = lambda kind: [x.points for x in picture.arrows if x.kind == kind]
        bars = {bar[-1] for bar in of(f"fan {way} bar")}
        ends = {fan[0] if way == "down" else fan[-1] for fan in of(f"fan {way}")}
        assert bars == {max(e for e in ends if e[0] == x) for x, _ in ends}


def test_messages_have_the_color_of_their_direction():
    picture = layout(PLANS["loops in levels"])
    (axes,) = draw.figure_of(picture).axes
    colors = {}
    for arrow, line in zip(picture.arrows, axes.lines, strict=True):
        (way,) = {"down", "up", "time"} & {*arrow.kind.split()}
        colors.setdefault(way, set()).add(line.get_color())
    blue, orange, grey = "#0072B2", "#D55E00", "#B8BDC6"
    assert colors == {"down": {blue}, "up": {orange}, "time": {grey}}


def test_the_same_plan_gives_the_same_file(tmp_path):
    for name in ("one.svg", "two.svg"):
        PLANS["step"].draw(tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@pytest.mark.parametrize("name", ["plan.pdf", "plan"])
def test_another_suffix_is_refused(name, tmp_path):
    with pytest.raises(drjax.DrjaxValueError, match=r"\.svg or \.png.* got .*plan"):
        PLANS["step"].draw(tmp_path / name)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        PLANS["step"].draw(tmp_path / "plan.svg")


@pytest.mark.slow
def test_example_prints_and_draws(tmp_path):
    out = run("-m", "examples.plans", "--output", tmp_path).stdout
    for name in ("local_sgd", "maml", "maml_gradients"):
        assert (tmp_path / f"{name}.svg").stat().st_size > 10_000
        assert f"{name}.svg" in out
    assert "mean over groups" in out and "bytes down" in out
