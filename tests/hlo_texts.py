"""Programs as XLA writes them, made by hand: each form of a collective that a compiler has been seen to write."""

import textwrap

from spmd.sharding.mesh import MeshShape, abstract_mesh


def text(body: str, before: str = "", devices: int = 8) -> str:
    lines = (
        textwrap.dedent(before)
        + "\nENTRY main {\n"
        + textwrap.indent(textwrap.dedent(body).strip("\n"), "  ")
        + "\n}\n"
    )
    return f"HloModule m, num_partitions={devices}\n{lines}"


ADD = """
add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
"""


CUBE = abstract_mesh(MeshShape(data=2, fsdp=2, tensor=2))
PAIRS = "replica_groups={{0,1},{2,3},{4,5},{6,7}}, channel_id=1, use_global_device_ids=true"


ASYNC = [
    (
        """
        x = f32[4,8]{1,0} parameter(0)
        s = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(x), PAIRS, dimensions={0}
        ROOT d = f32[8,8]{1,0} all-gather-done(s)
        """,
        [("all-gather", "tensor", 256, 1)],
    ),
    (
        """
        x = f32[4,8]{1,0} parameter(0)
        y = bf16[2]{0} parameter(1)
        s = ((f32[4,8]{1,0}, bf16[2]{0}), (f32[8,8]{1,0}, bf16[4]{0})) all-gather-start(x, y), PAIRS, dimensions={0}
        ROOT d = (f32[8,8]{1,0}, bf16[4]{0}) all-gather-done(s)
        """,
        [("all-gather", "tensor", 256, 1), ("all-gather", "tensor", 8, 1)],
    ),
    (
        """
        x = f32[4,8]{1,0} parameter(0)
        s = f32[4,8]{1,0} all-reduce-start(x), PAIRS, to_apply=add
        ROOT d = f32[4,8]{1,0} all-reduce-done(s)
        """,
        [("all-reduce", "tensor", 128, 1)],
    ),
    (
        """
        x = f32[4,8]{1,0} parameter(0)
        s = (f32[4,8]{1,0}, f32[4,8]{1,0}, u32[], u32[]) collective-permute-start(x), source_target_pairs={{0,4},{4,0}}
        ROOT d = f32[4,8]{1,0} collective-permute-done(s)
        """,
        [("collective-permute", "data", 128, 1)],
    ),
    (
        """
        x = f32[4,8]{1,0} parameter(0)
        s = ((f32[4,8]{1,0}), f32[2,8]{1,0}, u32[]) async-start(x), calls=scatter
        u = ((f32[4,8]{1,0}), f32[2,8]{1,0}, u32[]) async-update(s)
        ROOT d = f32[2,8]{1,0} async-done(u), calls=scatter
        """,
        [("reduce-scatter", "tensor", 128, 1)],
    ),
    (
        """
        x = f32[4,8]{1,0} parameter(0)
        o = s32[2]{0} parameter(1)
        ROOT r = f32[4,8]{1,0} ragged-all-to-all(x, x, o, o, o, o), channel_id=1, replica_groups=[4,2]<=[8]
        """,
        [("ragged-all-to-all", "tensor", 128, 1)],
    ),
    (
        """
        x = f32[4,8]{1,0} parameter(0)
        ROOT r = f32[4,8]{1,0} collective-broadcast(x), channel_id=1, replica_groups=[4,2]<=[8]
        """,
        [("collective-broadcast", "tensor", 128, 1)],
    ),
    (
        """
        x = f32[4,8]{1,0} parameter(0)
        s = (f32[4,8]{1,0}, f32[8,8]{1,0}) fusion(x), kind=kCustom, calls=chain_start
        g = f32[4,8]{1,0} get-tuple-element(s), index=0
        ROOT d = f32[8,8]{1,0} fusion(g), kind=kCustom, calls=chain_end
        """,
        [("all-gather", "tensor", 256, 1)],
    ),
]


CHAINED = f"""
scatter {{
  p = f32[4,8]{{1,0}} parameter(0)
  ROOT r = f32[2,8]{{1,0}} reduce-scatter(p), {PAIRS}, dimensions={{0}}, to_apply=add
}}
chain_start {{
  p = f32[4,8]{{1,0}} parameter(0)
  g = f32[8,8]{{1,0}} all-gather(p), {PAIRS}, dimensions={{0}}, frontend_attributes={{chain_id="6"}}
  ROOT c = (f32[4,8]{{1,0}}, f32[8,8]{{1,0}}) custom-call(g), custom_call_target="AsyncCollectiveStart"
}}
chain_end {{
  p = f32[4,8]{{1,0}} parameter(0)
  g = f32[8,8]{{1,0}} all-gather(p), {PAIRS}, dimensions={{0}}, frontend_attributes={{chain_id="6"}}
  ROOT c = f32[8,8]{{1,0}} custom-call(g), custom_call_target="AsyncCollectiveDone"
}}
"""


SCATTERED = """
x = f32[4,8]{1,0} parameter(0)
zero = s32[] constant(0)
id = u32[] partition-id()
two = u32[] constant(2)
mine = u32[] OP(id, two)
rows = u32[] multiply(mine, two)
r = (f32[4,8]{1,0}, f32[]) all-reduce(x, y), PAIRS, to_apply=add, metadata={op_name="sum"}
y = f32[] parameter(1)
whole = f32[4,8]{1,0} get-tuple-element(r), index=0
ROOT part = f32[2,8]{1,0} dynamic-slice(whole, rows, zero), dynamic_slice_sizes={2,8}
"""


FUSED = """
all-reduce-scatter.1 {
  p = f32[3,8]{1,0} parameter(0)
  nought = f32[] constant(0)
  x = f32[4,8]{1,0} pad(p, nought), padding=0_1x0_0
  r = f32[4,8]{1,0} all-reduce(x), PAIRS, to_apply=add
  start = u32[] parameter(1)
  zero = u32[] constant(0)
  ROOT part = f32[2,8]{1,0} dynamic-slice(r, start, zero), dynamic_slice_sizes={2,8}
}
"""


GATHERED = """
x = f32[16,8]{1,0} parameter(0), metadata={op_name="NAME"}
ROOT g = f32[32,8]{1,0} all-gather(x), GROUPS, channel_id=1, dimensions={0}, metadata={op_name="jit(f)/OPERATION"}
"""
