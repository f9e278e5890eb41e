from dilocox_jax.report import style
from dilocox_jax.report.labels import PointLabel, place_labels


def _place(labels):
  figure, (ax,) = style.frame(1, "")
  ax.plot([label.x for label in labels], [label.y for label in labels], "o")
  ax.set_xlim(0, 1)
  ax.set_ylim(0, 1)
  place_labels(figure, ax, labels)
  return ax.texts


def test_names_do_not_overlap():
  labels = [PointLabel(f"name {n}", 0.5, 0.4 + n / 100) for n in range(12)]
  texts = _place(labels)
  boxes = [text.get_window_extent() for text in texts]
  assert 0 < len(texts) < len(labels)
  assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_a_required_name_is_bold_and_shown_without_room():
  labels = [PointLabel(f"{n}", 0.5, 0.5, is_required=True) for n in range(30)]
  texts = _place(labels)
  assert len(texts) == 30
  assert {text.get_fontweight() for text in texts} == {"bold"}


def test_a_point_outside_the_axes_has_no_name():
  assert not _place([PointLabel("above", 0.5, 1.2, is_required=True)])
