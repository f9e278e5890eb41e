"""The decoder's loss as the papers write it: float64, one token at a time."""

import numpy as np


def norm(p, x, shape):
  if shape.norm == "layer":
    x = x - np.mean(x)
  return x / np.sqrt(np.mean(x * x) + shape.norm_epsilon) * p["scale"] + p.get(
    "bias", 0
  )


def project(p, x):
  return x @ p["kernel"] + p.get("bias", 0)


def stretched(speed, factor):
  # The rope type "llama3" of transformers, in its own words.
  wave_length = 2 * np.pi / speed
  if wave_length < 8192 / 4:
    return speed
  if wave_length > 8192:
    return speed / factor
  smooth = (8192 / wave_length - 1) / (4 - 1)
  return (1 - smooth) * speed / factor + smooth * speed


def rope(x, position, base, factor=1.0):
  # Pair (i, i + K/2) is a complex number; its angle grows with the position.
  half = len(x) // 2
  out = np.zeros_like(x)
  for i in range(half):
    z = complex(x[i], x[i + half])
    speed = stretched(base ** (-2 * i / len(x)), factor)
    z *= np.exp(1j * position * speed)
    out[i] = z.real
    out[i + half] = z.imag
  return out


def gelu(x):
  # The tanh form of Hendrycks and Gimpel 2016, arXiv 1606.08415.
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x):
  return x / (1 + np.exp(-x))


def relu(x):
  return np.maximum(x, 0)


def attention(p, stream, shape):
  """What attention adds to each position of one sequence."""
  n = shape.num_heads
  k = shape.head_width
  group = n // shape.kv_heads
  queries = []
  keys = []
  values = []
  for position, x in enumerate(stream):
    y = norm(p["norm"], x, shape)
    q, h, v = (
      project(p[name], y).reshape(-1, k) for name in ("query", "key", "value")
    )
    if shape.qk_norm:
      q = [norm(p["query_norm"], a, shape) for a in q]
      h = [norm(p["key_norm"], a, shape) for a in h]
    if shape.positions == "rope":
      turn = (position, shape.rope_base, shape.rope_factor)
      q, h = ([rope(a, *turn) for a in x] for x in (q, h))
    queries.append(q)
    keys.append(h)
    values.append(v)
  added = []
  for now in range(len(stream)):
    heads = []
    for head in range(n):
      scores = [
        queries[now][head] @ keys[then][head // group] / np.sqrt(k)
        for then in range(now + 1)
      ]
      weights = np.exp(scores) / np.sum(np.exp(scores))
      heads.append(
        sum(w * values[t][head // group] for t, w in enumerate(weights))
      )
    added.append(project(p["output"], np.concatenate(heads)))
  return added


def mlp(p, x, shape):
  y = norm(p["norm"], x, shape)
  hidden = project(p["up"], y)
  if shape.activation == "swiglu":
    hidden = silu(project(p["gate"], y)) * hidden
  else:
    hidden = {"gelu": gelu, "relu": relu}[shape.activation](hidden)
  return project(p["down"], hidden)


def layer_of(tree, layer):
  if isinstance(tree, dict):
    return {name: layer_of(leaf, layer) for name, leaf in tree.items()}
  return tree[layer]


def loss(params, sequences, shape):
  """Mean nats per predicted token; params are nested dicts of float64."""
  nats = []
  for tokens in sequences:
    stream = [params["embed"]["embedding"][t] for t in tokens[:-1]]
    if shape.positions == "learned":
      added = params["embed"]["positions"][: len(stream)]
      stream = [x + a for x, a in zip(stream, added, strict=True)]
    for layer in range(shape.num_layers):
      p = layer_of(params["blocks"], layer)
      added = attention(p["attention"], stream, shape)
      stream = [x + a for x, a in zip(stream, added, strict=True)]
      stream = [x + mlp(p["mlp"], x, shape) for x in stream]
    for x, target in zip(stream, tokens[1:], strict=True):
      y = norm(params["final_norm"], x, shape)
      head = params["embed"]["embedding"].T
      logits = y @ (head if shape.tied_head else params["head"]["kernel"])
      nats.append(np.log(np.sum(np.exp(logits))) - logits[target])
  return np.mean(nats)
