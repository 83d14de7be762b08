"""Tables of a deployment, what follows from them, and what rides."""

from absl.testing import parameterized

from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import prompt_admission, step_costs
from specpilot_jax.mechanisms.step_costs import StepCosts, Yields

# Bound by weights up to 64 nodes, by products from there on.
COSTS = StepCosts((1, 64, 128, 256), (100.0, 100.0, 180.0, 350.0))
YIELDS = Yields((1, 2, 4, 8, 16), (1.0, 1.7, 2.6, 3.3, 3.6))


class StepCostsTest(parameterized.TestCase):
  def test_between_points(self):
    for nodes, us in ((1, 100), (64, 100), (96, 140), (128, 180), (999, 350)):
      self.assertEqual(COSTS.at(nodes), us)
    self.assertEqual(Yields((2, 4), (1.0, 2.0)).at(1), 1.0)

  @parameterized.parameters(
    ((), (), "step costs: 0 numbers of nodes and 0 values"),
    ((1, 2), (1.0,), "2 numbers of nodes and 1 values, expected as many"),
    ((2, 2), (1.0, 1.0), r"nodes must increase, got \[2, 2\]"),
    ((0,), (1.0,), "1.0 at 0 nodes, expected numbers above 0"),
    ((1,), (0.0,), "0.0 at 1 nodes"),
    ((1,), (float("nan"),), "nan at 1 nodes"),
    ((1.5,), (1.0,), "1.0 at 1.5 nodes"),
  )
  def test_refuses(self, nodes, values, message):
    with self.assertRaisesRegex(SpecPilotError, message):
      StepCosts(nodes, values)

  def test_the_number_of_nodes_follows_the_load(self):
    """By hand: every choice's tokens a second, compared."""
    choices = (16, 32, 64, 128, 256)
    found = {}
    for load in (1, 4, 16, 32, 64, 128):
      rates = {
        n: load * YIELDS.at(n / load) / COSTS.at(n)
        for n in (load, *choices)
        if n >= load
      }
      found[load] = step_costs.nodes_for(load, COSTS, YIELDS, choices)
      self.assertEqual(rates[found[load]], max(rates.values()))
    # Free nodes are all used, of equally good choices the smallest.
    self.assertEqual((found[1], found[4], found[16]), (16, 64, 64))

  def test_saturated(self):
    """Where each node costs what it brings, no draft is verified."""
    costs = StepCosts((1, 256), (100.0, 25600.0))
    for load in (4, 16, 32):
      self.assertEqual(
        step_costs.nodes_for(load, costs, YIELDS, (64, 128, 256)), load
      )

  def test_price(self):
    free = step_costs.node_price(1, COSTS, YIELDS, 16)
    self.assertEqual(free, 0.0)
    # 128 nodes of 16 requests: 80 us for 64 nodes more, and 16 x 3.3 tokens
    # in 180 us.
    dear = step_costs.node_price(16, COSTS, YIELDS, 127)
    self.assertAlmostEqual(
      dear, 80 / 64 * 16 * YIELDS.at(127 / 16) / COSTS.at(127)
    )
    # Behind the last point: the slope before it.
    last = step_costs.node_price(16, COSTS, YIELDS, 400)
    self.assertAlmostEqual(last, 170 / 128 * 16 * 3.6 / 350)
    self.assertEqual(
      step_costs.node_price(1, StepCosts((8,), (1.0,)), YIELDS, 8), 0.0
    )

  @parameterized.parameters(
    # Passes of 128 tokens cost 128 us, riding less, as much, or more.
    (512, 31.0, 0.0, 32),
    (512, 32.0, 0.0, 32),
    (512, 33.0, 0.0, 0),
    # The rest of a prompt: one pass or the other.
    (5, 127.0, 0.0, 5),
    (5, 129.0, 0.0, 0),
    (40, 64.0, 0.0, 32),
    (40, 65.0, 0.0, 0),
    # 16 rounds in place of 4, and slots that wait: 16 x (2 + 41) is more than
    # 4 x (128 + 41), 16 x (2 + 40) is as much.
    (512, 2.0, 40.0, 32),
    (512, 2.0, 41.0, 0),
    (5, 2.0, 1e9, 5),
  )
  def test_admission(self, unread, more_us, idle_us, want):
    got = prompt_admission.riding(
      unread,
      places=32,
      chunk=128,
      more_us=more_us,
      own_us=128.0 * -(-unread // 128),
      idle_us=idle_us,
    )
    self.assertEqual(got, want)
