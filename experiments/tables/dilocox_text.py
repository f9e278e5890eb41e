"""How to read DiLoCoX's tables: what was assumed, and what is not tested."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Facts:
  """Numbers that the paragraphs quote, all from the tables' own runs.

  Attributes:
    compute_s: Seconds that the 107B model computes in a round.
    exchange_s: Its exchange, compressed.
    dense_s: Its exchange, uncompressed.
    codec_s: Fitted on its row without overlap.
    exposed: Its throughput with that codec time in the way (tokens/s).
    half_factors: Its throughput without overlap if the factors were sent in
      fp16 and the codec were free (tokens/s).
    utilisations: Share of the peak behind both models' throughput.
    compressions: What CocktailSGD's rows need, for both models (ratio).
  """

  compute_s: float
  exchange_s: float
  dense_s: float
  codec_s: float
  exposed: float
  half_factors: float
  utilisations: tuple[float, float]
  compressions: tuple[float, float]


def throughput(facts: Facts) -> list[str]:
  """Below the table of throughputs."""
  small, large = facts.utilisations
  few, many = facts.compressions
  return [
    "One recipe for both models: gradients in fp32, 2 clusters with one link of"
    " 1 Gbit/s each (all of it payload, no delay), 32,768 tokens a global step"
    " (16 sequences of 2048), H = 125, and one fitted constant a model: the"
    " seconds of a step, from the row of DiLoCoX. The paper states none of"
    " clusters, batch, precision and step time where we could read it; its"
    " example has 2 clusters. Bytes are those of the plan that would be"
    " trained.",
    "What the rows test. AllReduce is bytes over bandwidth: it tests the count"
    " of parameters and tokens / (bytes x 2 (D - 1) / D), and no more than that"
    " quotient can be told from it. DiLoCoX tests nothing: its exchange takes"
    f" {facts.exchange_s:.0f} s and hides behind {facts.compute_s:.0f} s of"
    " compute, so the row is the fitted speed of the devices; H, rank, bits and"
    " bandwidth do not enter. Both ratios are the seconds of an AllReduce step"
    " over those of a computed step. The row without compression is a real"
    f" prediction: {facts.dense_s:.0f} s of exchange no longer hide.",
    f"The fitted steps mean that devices achieve {small:.1%} (OPT-1.3B) and"
    f" {large:.1%} (107B) of 312 TFLOP/s. A simulator told 40 % would predict"
    " ten times the throughput. Why so little is not said: activations between"
    " pipeline stages over the same 1 Gbit/s, or the bubble of many stages,"
    " would explain it; the step is left fitted.",
    f"Without overlap the bytes cost {facts.exchange_s:.0f} s a round, and"
    f" {facts.codec_s:.0f} s are missing to the published row. They are fitted"
    " as time of the codec (rank-2048 factors of every matrix). That codec must"
    " then run beside the next round, as the paper's second thread does: in the"
    f" way, it would bring DiLoCoX to {facts.exposed:,.0f} tokens/s. Factors in"
    " fp16 instead of 4 bits and a free codec would give"
    f" {facts.half_factors:,.0f}, which is nearer but not enough.",
    "CocktailSGD: 117 times fewer bytes than fp32 (their abstract; a mask of"
    " 15 %, of which a fifth, 4 bits and a bitmap), exchanged in turn with"
    f" compute. The published rows need {few:.0f} times (OPT-1.3B) and"
    f" {many:.0f} times (107B), or an overlap that differs between the two: no"
    " one setting gives both, so these rows do not follow.",
    "No figure was found for OpenDiLoCo's speed (the 107B run is said to have"
    " run out of memory): fp16, H = 125 and waiting are assumed. The ratio's"
    " two last rows are fitted choices: settings that the paper's text allows,"
    " picked because they give 357. They say that 357 is possible, not that it"
    " was so.",
  ]


def sensitivity(num_parameters: int) -> list[str]:
  """Below the table of settings."""
  return [
    "Each cell is the prediction with its error against the published figure;"
    " 32,768 tokens a step and the fitted steps throughout. The bytes of a"
    " value are those of gradients and of pseudo-gradients that are not"
    f" compressed. {num_parameters / 1e9:.2f} B parameters follow from the"
    " recalled layers and widths; the paper rounds to 107 B.",
    "Only bytes x 2 (D - 1) / D can be told from the rows: 4 bytes at D = 2 and"
    " 2 bytes at D = 20 put nearly the same on the wire (4.0 and 3.8 bytes a"
    " value) and fit nearly as well, though 16 devices cannot make 20 clusters."
    " OPT-1.3B and the row without compression ask for about 4.0, the 107B"
    " AllReduce for a tenth less, which 2 bytes and D = 10 give. With the"
    " headers of TCP and Ethernet taken off the rate, the 107B model at 4 bytes"
    " and D = 2 is 13 % too slow and its ratio 16 % too high, which is why"
    " 1 Gbit/s is read as payload above.",
    "The exchange of DiLoCoX stays hidden in every setting, so its own row"
    " would be the same in all of them. If each of L pairs of nodes had a link"
    " of its own, every exchange would be L times faster, and the same numbers"
    " would stand for L times the tokens a step.",
  ]
