import numpy as np

from tests.oracles import least_squares

PROBLEM = least_squares.make_problem(
  seed=3, num_replicas=1, num_steps=1, num_layers=5, width=3, batch=8
)


def test_the_gradient_is_the_slope_of_the_loss():
  params, A, y = PROBLEM
  _, grad = least_squares.loss_and_grad(params, A[0, 0], y[0, 0])
  x = least_squares.to_vector(params)
  for i in range(len(x)):
    step = np.zeros_like(x)
    step[i] = 1e-3
    up = least_squares.from_vector(x + step, params)
    down = least_squares.from_vector(x - step, params)
    above, _ = least_squares.loss_and_grad(up, A[0, 0], y[0, 0])
    below, _ = least_squares.loss_and_grad(down, A[0, 0], y[0, 0])
    slope = (above - below) / 2e-3
    assert abs(slope - least_squares.to_vector(grad)[i]) < 1e-9
