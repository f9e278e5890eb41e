"""The decoder's loss as the papers write it: float64, one token at a time."""

import numpy as np


def rms_norm(x, scale):
  return x / np.sqrt(np.mean(x * x) + 1e-6) * scale


def rope(x, position):
  # Pair (i, i + K/2) is a complex number; its angle grows with the position.
  half = len(x) // 2
  out = np.zeros_like(x)
  for i in range(half):
    z = complex(x[i], x[i + half])
    z *= np.exp(1j * position * 10000.0 ** (-2 * i / len(x)))
    out[i], out[i + half] = z.real, z.imag
  return out


def gelu(x):
  # The tanh form of Hendrycks and Gimpel 2016, arXiv 1606.08415.
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x):
  return x / (1 + np.exp(-x))


def attention(p, stream, shape):
  """What attention adds to each position of one sequence."""
  n, k = shape.num_heads, shape.head_width
  group = n // shape.kv_heads
  queries, keys, values = [], [], []
  for position, x in enumerate(stream):
    y = rms_norm(x, p["norm"]["scale"])
    q, h, v = (
      (y @ p[name]["kernel"]).reshape(-1, k)
      for name in ("query", "key", "value")
    )
    if shape.qk_norm:
      q = [rms_norm(a, p["query_norm"]["scale"]) for a in q]
      h = [rms_norm(a, p["key_norm"]["scale"]) for a in h]
    queries.append([rope(a, position) for a in q])
    keys.append([rope(a, position) for a in h])
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
    added.append(np.concatenate(heads) @ p["output"]["kernel"])
  return added


def mlp(p, x, shape):
  y = rms_norm(x, p["norm"]["scale"])
  hidden = y @ p["up"]["kernel"]
  if shape.activation == "swiglu":
    return (silu(y @ p["gate"]["kernel"]) * hidden) @ p["down"]["kernel"]
  return gelu(hidden) @ p["down"]["kernel"]


def layer_of(tree, layer):
  if isinstance(tree, dict):
    return {name: layer_of(leaf, layer) for name, leaf in tree.items()}
  return tree[layer]


def loss(params, sequences, shape):
  """Mean nats per predicted token; params are nested dicts of float64."""
  nats = []
  for tokens in sequences:
    stream = [params["embed"]["embedding"][t] for t in tokens[:-1]]
    for layer in range(shape.num_layers):
      p = layer_of(params["blocks"], layer)
      added = attention(p["attention"], stream, shape)
      stream = [x + a for x, a in zip(stream, added, strict=True)]
      stream = [x + mlp(p["mlp"], x, shape) for x in stream]
    for x, target in zip(stream, tokens[1:], strict=True):
      y = rms_norm(x, params["final_norm"]["scale"])
      head = params["embed"]["embedding"].T
      logits = y @ (head if shape.tied_head else params["head"]["kernel"])
      nats.append(np.log(np.sum(np.exp(logits))) - logits[target])
  return np.mean(nats)
