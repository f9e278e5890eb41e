"""Scheduled programs for two slices, written by hand after real ones."""

_CHANNEL = (
  'frontend_attributes={{_xla_host_transfer_rendezvous="{0}",'
  '_xla_megascale_transfer_type="{1}"}}'
)
_LOOP = (
  'condition=%cond, body=%body, metadata={op_name="jit(f)/inner_steps/while"}'
)


def send(name, kind="ALL_REDUCE", operand="%message"):
  channel = _CHANNEL.format(name, kind)
  state = "(f32[10,100]{1,0:T(8,128)}, u32[], token[])"
  return [
    f"%send.{name} = {state} send({operand}, %after), {channel}",
    f"%recv.{name} = {state} recv(%after), {channel}",
  ]


def done(name):
  return [
    f"%send-done.{name} = token[] send-done(%send.{name})",
    f"%recv-done.{name} = (f32[10,100]{{1,0}}, token[]) "
    f"recv-done(%recv.{name})",
  ]


def loop(name):
  return [f"%while.{name} = (s32[], f32[4]{{0}}) while(%carry), {_LOOP}"]


def program(*instructions):
  """Text of a program whose entry has these instructions."""
  lines = [line for part in instructions for line in part]
  entry = "\n".join(f"  {line}" for line in lines)
  return f"""HloModule jit_f, is_scheduled=true

%cond (c: (s32[], f32[4])) -> pred[] {{
  %c = (s32[], f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %bound = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}}

%body (b: (s32[], f32[4])) -> (s32[], f32[4]) {{
  ROOT %b = (s32[], f32[4]{{0}}) parameter(0)
}}

ENTRY %main (p: f32[10,100]) -> f32[] {{
  %message = f32[10,100]{{1,0}} parameter(0)
  %carry = (s32[], f32[4]{{0}}) parameter(1)
  %after = token[] after-all()
{entry}
  ROOT %end = f32[] constant(0)
}}
"""


FIRST = 3  # Number of the first instruction that is handed in.
HIDDEN = program(send("a"), loop(1), done("a"), send("b"), loop(2), done("b"))
EXPOSED = program(send("a"), done("a"), send("b"), done("b"), loop(1), loop(2))
