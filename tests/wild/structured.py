"""A graph network (NNX), and a network with several inputs and outputs (Linen)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from spmd.sharding.rules import Rules
from tests.wild.example import BATCH, SMALL, Example, draw_batches, integers, normal

NODES, EDGES, WIDTH = 6, 12, 16


class MessagePassing(nnx.Module):
    """Messages along edges, summed at their receivers, and a residual update of nodes and edges (arXiv:1806.01261)."""

    def __init__(self, rngs):
        self.edge_mlp = nnx.Linear(3 * WIDTH, WIDTH, rngs=rngs)
        self.node_mlp = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, nodes, edges, senders, receivers):
        messages = jnp.concatenate([edges, nodes[senders], nodes[receivers]], axis=-1)
        edges = edges + nnx.relu(self.edge_mlp(messages))
        received = jax.ops.segment_sum(edges, receivers, num_segments=NODES)
        update = nnx.relu(self.node_mlp(jnp.concatenate([nodes, received], axis=-1)))
        return self.norm(nodes + update), edges


class GraphNetwork(nnx.Module):
    """A number for each of a batch of graphs."""

    def __init__(self, rngs):
        self.node_encoder, self.edge_encoder = (
            nnx.Linear(4, WIDTH, rngs=rngs),
            nnx.Linear(2, WIDTH, rngs=rngs),
        )
        self.rounds = nnx.List([MessagePassing(rngs) for _ in range(2)])
        self.readout = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, nodes, edges, senders, receivers):
        return jax.vmap(self.of_graph)(nodes, edges, senders, receivers)

    def of_graph(self, nodes, edges, senders, receivers):
        nodes, edges = self.node_encoder(nodes), self.edge_encoder(edges)
        for message_passing in self.rounds:
            nodes, edges = message_passing(nodes, edges, senders, receivers)
        return self.readout(nodes.mean(axis=0))[0]


def squared_error(outputs, batch):
    errors = jnp.square(outputs - batch["targets"])
    return errors.sum(), errors.size


GRAPH_NETWORK = Example(
    network=GraphNetwork,
    rules=Rules(
        [
            ("(node|edge)_encoder/kernel", P(None, ("fsdp", "tensor"))),
            ("rounds/[0-9]/edge_mlp/kernel", P("fsdp", "tensor")),
            ("rounds/[0-9]/node_mlp/kernel", P("tensor", "fsdp")),
            ("readout/kernel|.*bias|rounds/[0-9]/norm/scale", SMALL),
        ]
    ),
    batches=draw_batches(
        nodes=normal(BATCH, NODES, 4),
        edges=normal(BATCH, EDGES, 2),
        senders=integers(NODES, BATCH, EDGES),
        receivers=integers(NODES, BATCH, EDGES),
        targets=normal(BATCH),
    ),
    inputs=lambda batch: tuple(batch[name] for name in ("nodes", "edges", "senders", "receivers")),
    loss=squared_error,
    optimizer=optax.adam(1e-3),
)


class Clinic(nn.Module):
    """A diagnosis and a risk of a patient, from a scan, a series of measurements and a table's row."""

    @nn.compact
    def __call__(self, scan, series, row):
        image = nn.relu(nn.Conv(WIDTH, (3, 3), strides=(2, 2), name="scan_conv")(scan)).mean(
            axis=(1, 2)
        )
        steps = nn.RNN(nn.GRUCell(WIDTH), name="series_rnn")(series)
        columns = nn.Dense(WIDTH, name="row_dense")(row)
        together = nn.relu(
            nn.Dense(WIDTH, name="fusion")(jnp.concatenate([image, steps[:, -1], columns], axis=-1))
        )
        return {
            "diagnosis": nn.Dense(4, name="diagnosis")(together),
            "risk": nn.Dense(1, name="risk")(together)[:, 0],
        }


def both_tasks(outputs, batch):
    diagnosis = optax.softmax_cross_entropy_with_integer_labels(
        outputs["diagnosis"], batch["diagnosis"]
    )
    losses = diagnosis + 0.5 * optax.huber_loss(outputs["risk"], batch["risk"])
    return losses.sum(), losses.size


CLINIC = Example(
    network=Clinic(),
    rules=Rules(
        [
            ("scan_conv/kernel", P(None, None, None, ("fsdp", "tensor"))),
            (".*GRUCell_0/(in|ir|iz|hn|hr|hz)/kernel", P("fsdp", "tensor")),
            ("row_dense/kernel", P(None, "tensor")),
            ("fusion/kernel", P("tensor", "fsdp")),
            ("(diagnosis|risk)/kernel|.*bias", SMALL),
        ]
    ),
    batches=draw_batches(
        scan=normal(BATCH, 8, 8, 1),
        series=normal(BATCH, 5, 8),
        row=normal(BATCH, 6),
        diagnosis=integers(4, BATCH),
        risk=normal(BATCH),
    ),
    inputs=lambda batch: (batch["scan"], batch["series"], batch["row"]),
    loss=both_tasks,
)
