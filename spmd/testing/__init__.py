"""Parity tests of layouts: comparison with one device, injected bugs, expected collectives, and test batches."""

from spmd.analysis.collective_audit import expect_collectives as expect_collectives
from spmd.optim.layerwise import assert_layerwise as assert_layerwise
from spmd.testing.batches import pad_unevenly as pad_unevenly
from spmd.testing.batches import token_batches as token_batches
from spmd.testing.bugs import BUGS as BUGS
from spmd.testing.bugs import drop_reduction as drop_reduction
from spmd.testing.bugs import drop_weights as drop_weights
from spmd.testing.bugs import repeat_microbatch as repeat_microbatch
from spmd.testing.bugs import scale_gradients as scale_gradients
from spmd.testing.bugs import scale_one_leaf as scale_one_leaf
from spmd.testing.parity import TOLERANCES as TOLERANCES
from spmd.testing.parity import Parity as Parity
from spmd.testing.parity import Row as Row
from spmd.testing.parity import Tolerance as Tolerance
from spmd.testing.reference import Reference as Reference
from spmd.testing.reference import assert_parity as assert_parity
