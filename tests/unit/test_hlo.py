"""The text of compiled programs is read as XLA means it: shapes, groups in every written form, loops, source lines."""

import math
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.analysis.hlo import HloArray, HloValue, parse
from spmd.analysis.replica_groups import mesh_axes, per_device, read_groups
from spmd.analysis.trip_count import integer, trip_count

AXES = {"pipe": 1, "data": 2, "fsdp": 2, "tensor": 2}


def program(text: str):
    return parse(textwrap.dedent(text).lstrip("\n"))


@pytest.mark.parametrize(
    ("dtype", "dims", "size"),
    [
        ("f32", (2, 3), 24),
        ("bf16", (5,), 10),
        ("pred", (3,), 3),
        ("s4", (3,), 2),
        ("f8e4m3fn", (4,), 4),
        ("c64", (), 8),
        ("token", (), 0),
    ],
)
def test_bytes(dtype, dims, size) -> None:
    """An array's bytes follow from the name of its type; types below a byte are packed."""
    assert HloArray(dtype, dims).bytes == size


def test_instructions() -> None:
    """Operands are found with and without their types, behind layouts, tiles, comments and nested tuples."""
    p = program("""
        HloModule m, input_output_alias={ {0}: (1, {}, may-alias), {2}: (0, {}, must-alias) }, num_partitions=8

        %inner (p: f32[2]) -> f32[2] {
          ROOT %p = f32[2]{0:T(128)S(1)} parameter(0)
        }

        ENTRY main {
          a = f32[2]{0} parameter(0), metadata={op_name="params[\\'w\\']"}
          %b = (f32[2]{0:T(8,128)(2,1)}, /*index=1*/(s32[], u32[])) tuple(f32[2]{0} a, /*index=1*/(f32[], s32[2]{0}) %a)
          ROOT %c.1 = f32[2]{0} fusion(%a), kind=kLoop, calls=%inner
        }
    """)
    assert (p.entry, p.partitions, p.replicas, p.aliases) == ("main", 8, 1, {0: 1, 2: 0})
    body = p.computations["main"]
    assert body.root == "c.1"
    assert body.instructions["b"].operands == ("a", "a")
    assert body.instructions["b"].arrays == (
        HloArray("f32", (2,)),
        HloArray("s32", ()),
        HloArray("u32", ()),
    )
    assert [(user.name, position) for user, position in body.users["a"]] == [
        ("b", 0),
        ("b", 1),
        ("c.1", 0),
    ]
    assert p.producer(HloValue("main", "c.1")) == HloValue("main", "a")


def test_an_instruction_may_take_several_lines() -> None:
    """What a Pallas kernel says of itself ends no computation, and what stands behind it belongs to the kernel."""
    p = program("""
        HloModule m

        %inner (p: f32[2]) -> f32[2] {
          ROOT %p = f32[2]{0} parameter(0)
        }

        ENTRY main {
          %a = f32[2]{0} parameter(0)
          %b = f32[2]{0} custom-call(%a), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
        "xprof_metadata":"{\\"block_q\\": 512}"
        }}, metadata={op_name="attend"}
          ROOT %c = f32[2]{0} fusion(%b), kind=kLoop, calls=%inner
        }
    """)
    body = p.computations["main"]
    assert (list(body.instructions), body.root) == (["a", "b", "c"], "c")
    assert body.instructions["b"].attribute(r'op_name="(\w+)"') == "attend"


FORMS = [
    ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
    ("replica_groups={{0,4},{1,5},{2,6},{3,7}}, use_global_device_ids=true", ("data",)),
    ("replica_groups=[2,4]<=[8]", ("fsdp", "tensor")),
    ("channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", ("data",)),
    ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", ("data", "tensor")),
    ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",)),
    ("channel_id=3, replica_groups={}", ("data", "fsdp", "tensor")),
    ("channel_id=3, replica_groups={{0}}", ("data", "fsdp", "tensor")),
    ("replica_groups={{0}}", ()),
    ("replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}", ()),
    ("replica_groups=mesh['a'=2,'b'=4] {'a'}, use_global_device_ids=true", ("data",)),
    ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1':(1)2}", ("fsdp",)),
    ("replica_groups=mesh['axis_0'=8] {'axis_0':(1)2,'axis_0':(4)2}", ("data", "tensor")),
    (
        "replica_groups=mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}, dimensions={0}",
        ("fsdp", "tensor"),
    ),
    ("replica_groups=mesh['a'=2,'b'=4], device_ids=(0,1,4,5,2,3,6,7) {'a'}", ("fsdp",)),
    ("replica_groups=mesh[a=2,b=4] {b:(2)2}", ("tensor",)),
    ("replica_groups=@mesh<a=2,b=2,c=2> {c,a}", ("data", "tensor")),
    ("replica_groups=mesh['a'=8] {}", ()),
    ("replica_groups={{0,3},{1,2},{4,7},{5,6}}", None),
    ("replica_groups={{0,1,2},{3,4,5,6,7}}", None),
    ("replica_groups={{0,1},{2,3}}", None),
    ("channel_id=1, source_target_pairs={{0,1},{1,0},{2,3},{3,2}}", ("tensor",)),
    ("source_target_pairs={{0,6},{6,0}}", ("data", "fsdp")),
    ("source_target_pairs={{0,0},{1,1}}", ()),
    ("source_target_pairs={}", ()),
]


@pytest.mark.parametrize(("attributes", "axes"), FORMS)
def test_groups(attributes, axes) -> None:
    """Each written form names the axes that vary inside a group, or none where groups are no product of axes."""
    groups, pairs = read_groups(attributes, 8)
    assert mesh_axes(groups, AXES, pairs=pairs) == axes


@st.composite
def meshes(draw):
    """Axis sizes, and some of the axes."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    names = [f"a{i}" for i in range(len(sizes))]
    return dict(zip(names, sizes, strict=True)), draw(st.sets(st.sampled_from(names)))


def written_forms(axes: dict[str, int], chosen: set[str]) -> list[str]:
    """The groups over some axes in every form that XLA has for them."""
    sizes, names = list(axes.values()), list(axes)
    order = [i for i, name in enumerate(names) if name not in chosen] + [
        i for i, name in enumerate(names) if name in chosen
    ]
    members = math.prod(axes[name] for name in chosen)
    groups = np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(-1, members)
    listed = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups)
    shape, dims, perm = (
        f"[{len(groups)},{members}]",
        ",".join(map(str, sizes)),
        ",".join(map(str, order)),
    )
    mesh = ",".join(f"'{name}'={size}" for name, size in axes.items())
    flat = math.prod(sizes)
    behind = {name: math.prod(sizes[i + 1 :]) for i, name in enumerate(names)}
    parts = ",".join(
        f"'x':({flat // behind[n] // axes[n]}){axes[n]}"
        for n in names
        if n in chosen and axes[n] > 1
    )
    ids = ",".join(map(str, np.arange(flat).reshape(sizes).transpose().ravel()))
    turned = ",".join(f"'{name}'={axes[name]}" for name in reversed(names))
    used = ",".join(f"'{name}'" for name in names if name in chosen)
    back = ",".join(str(i) for i in reversed(range(len(sizes))))
    return [
        f"channel_id=1, replica_groups={{{listed}}}",
        f"replica_groups={shape}<=[{dims}]T({perm}), dimensions={{0}}",
        f"replica_groups=mesh[{mesh}] {{{used}}}",
        f"replica_groups=mesh['x'={flat}] {{{parts}}}",
        f"replica_groups=mesh[{turned}], device_ids=({ids}) {{{used}}}",
        f"replica_groups=mesh[{turned}], device_ids=([{dims}]T({back})) {{{used}}}",
    ]


@settings(max_examples=60, deadline=None)
@given(meshes())
def test_every_form_names_the_same_axes(case) -> None:
    """For any mesh and any of its axes, every written form is read as those axes (of more than one device)."""
    axes, chosen = case
    expected = tuple(name for name, size in axes.items() if name in chosen and size > 1)
    for text in written_forms(axes, chosen):
        groups, pairs = read_groups(text, math.prod(axes.values()))
        if len(groups) == 1 and len(groups[0]) == 1:
            continue
        assert mesh_axes(groups, axes, pairs=pairs) == expected, text


@settings(max_examples=60, deadline=None)
@given(meshes(), st.randoms())
def test_control_shuffled_groups_have_other_axes(case, random) -> None:
    """Groups over shuffled devices are named only if they are a product of axes after all, or a part of one axis."""
    axes, chosen = case
    groups, _ = read_groups(written_forms(axes, chosen)[0], math.prod(axes.values()))
    places = list(range(math.prod(axes.values())))
    random.shuffle(places)
    shuffled = [[places[device] for device in group] for group in groups]
    named = mesh_axes(shuffled, axes)
    if named is not None:
        again, _ = read_groups(written_forms(axes, set(named))[0], len(places))
        whole = [frozenset(group) for group in again]
        assert all(any(group <= found for found in whole) for group in map(frozenset, shuffled))
        assert len(named) == 1 or len(shuffled) == len(whole)  # only along one axis is there a part


LOOP = """
    HloModule m, num_partitions=8

    body {{
      p = (s32[], f32[2]) parameter(0)
      i = s32[] get-tuple-element(p), index=0
      x = f32[2] get-tuple-element(p), index=1
      one = s32[] constant({step})
      i.copy = s32[] copy(i)
      next = s32[] add(i.copy, one)
      ROOT t = (s32[], f32[2]) tuple(next, x)
    }}

    compared {{
      a = s32[] parameter(0)
      b = s32[] parameter(1)
      ROOT c = pred[] compare(a, b), direction={direction}
    }}

    condition {{
      p = (s32[], f32[2]) parameter(0)
      i = s32[] get-tuple-element(p), index=0
      n = s32[] constant({stop})
      ROOT c = pred[] fusion(i, n), kind=kLoop, calls=compared
    }}

    ENTRY main {{
      x = f32[2] parameter(0)
      zero = s32[] {start}
      zero.copy = s32[] copy(zero)
      t = (s32[], f32[2]) tuple(zero.copy, x)
      ROOT w = (s32[], f32[2]) while(t), condition=condition, body=body{known}
    }}
"""


@pytest.mark.parametrize(
    ("changes", "turns"),
    [
        ({}, 7),
        ({"direction": "LE"}, 8),
        ({"step": 2}, 4),
        ({"start": "constant(3)"}, 4),
        ({"start": "constant(9)"}, 0),
        ({"start": "partition-id()"}, None),
        ({"step": -1}, None),
        ({"direction": "GT"}, None),
        (
            {
                "known": ', backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0","step":"1"}}'
            },
            5,
        ),
        ({"known": ", backend_config={known_trip_count={n=4}}"}, 4),
    ],
)
def test_trip_count(changes, turns) -> None:
    """A loop's length is what the compiler says, else what start, step and limit give, else unknown."""
    values = {
        "step": 1,
        "direction": "LT",
        "stop": 7,
        "start": "constant(0)",
        "known": "",
    } | changes
    p = program(LOOP.format(**values))
    assert trip_count(p, "main", p.computations["main"].instructions["w"]) == turns


def test_values_pass_through_loops() -> None:
    """What a loop hands on unchanged comes from before it, and what it changes does not."""
    p = program(LOOP.format(step=1, direction="LT", stop=7, start="constant(0)", known=""))
    assert p.producer(HloValue("main", "w", 1)) == HloValue("main", "x")
    assert p.producer(HloValue("main", "w", 0)) == HloValue("main", "w", 0)
    assert p.producer(HloValue("body", "x")) == HloValue("main", "x")
    assert integer(p, HloValue("condition", "n")) == 7
    assert [user for _, user, _ in p.uses(HloValue("main", "x"))] == [None]


@pytest.mark.parametrize(
    ("start", "update", "last"),
    [
        ("call-start(x)", "", "start"),
        ("call-start()", "update = f32[2] call-update(start, x)", "update"),
    ],
)
def test_values_pass_through_asynchronous_calls(start, update, last) -> None:
    """A TPU7x's SparseCores run collectives as calls, whose operands newer compilers name in the update."""
    p = program(f"""
        HloModule m, num_partitions=4

        called {{
          q = f32[2] parameter(0)
          ROOT r = f32[2] all-reduce(q), replica_groups={{}}, to_apply=add
        }}

        ENTRY main {{
          x = f32[2] parameter(0)
          start = ((f32[2]), f32[2]) {start}, to_apply=called
          {update}
          ROOT done = f32[2] call-done({last})
        }}
    """)
    assert p.producer(HloValue("main", "done")) == HloValue("called", "r")
    assert p.producer(HloValue("called", "q")) == HloValue("main", "x")
    assert [user for _, user, _ in p.uses(HloValue("called", "r"))] == [None]


def test_per_device() -> None:
    """Offsets that devices compute from their number are computed for each, from tables too; others are not known."""
    p = program("""
        HloModule m, num_partitions=4

        ENTRY main {
          x = u32[] parameter(0)
          id = u32[] partition-id()
          table = u32[4]{0} constant({0, 0, 1, 1})
          row = u32[1]{0} dynamic-slice(table, id), dynamic_slice_sizes={1}
          low = u32[1]{0} constant({0})
          high = u32[1]{0} constant({1})
          bounded = u32[1]{0} clamp(low, row, high)
          eight = u32[1]{0} constant({8})
          offset = u32[1]{0} multiply(bounded, eight)
          scalar = u32[] bitcast(offset)
          long = u32[256]{0} constant({...})
          place = u32[1]{0} dynamic-slice(long, id), dynamic_slice_sizes={1}
          ROOT odd = u32[] add(scalar, x)
        }
    """)
    offset = per_device(p, HloValue("main", "scalar"), 4)
    assert offset is not None
    assert offset.tolist() == [[0], [0], [8], [8]]
    assert per_device(p, HloValue("main", "odd"), 4) is None
    # of a table too long for the program's text
    place = per_device(p, HloValue("main", "place"), 4)
    assert place is not None
    assert len({*place[:, 0]}) == 4


def test_frames() -> None:
    """Source lines come from the tables above the program, parents' numbers being one too high."""
    p = program("""
        HloModule m

        FileNames
        1 "/src/train.py"
        2 "/src/model.py"

        FunctionNames
        1 "<module>"

        FileLocations
        1 {file_name_id=1 function_name_id=1 line=20 end_line=20 column=2 end_column=2}
        2 {file_name_id=2 function_name_id=1 line=6 end_line=6 column=6 end_column=6}

        StackFrames
        1 {file_location_id=1 parent_frame_id=1}
        2 {file_location_id=2 parent_frame_id=2}


        ENTRY main {
          a = f32[] parameter(0), metadata={op_name="a" stack_frame_id=2}
          b = f32[] negate(a), metadata={op_name="b" stack_frame_id=1}
          ROOT c = f32[] negate(b)
        }
    """)
    body = p.computations["main"].instructions
    assert p.frames(body["a"]) == [("/src/model.py", 6), ("/src/train.py", 20)]
    assert p.frames(body["b"]) == [("/src/train.py", 20)]
    assert p.frames(body["c"]) == []
