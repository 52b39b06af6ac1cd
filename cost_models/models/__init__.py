"""Cost models: name -> class.

To add one: write `<name>.py` beside this file with a class that answers some or all of the questions of
`cost_models.price.CostModel` (`operation`, `transfer`, `collective`, `host_copy`), and add one line to
`COST_MODELS`. The tests of the models run over every line: more work never costs less, bands hold the price,
one rank is free.
"""

from cost_models.models.cluster import ClusterCostModel
from cost_models.models.collectives import Collectives
from cost_models.models.host_copy import HostCopy
from cost_models.models.roofline import Roofline
from cost_models.models.unit import UnitCostModel

COST_MODELS: dict[str, type] = {
    "roofline": Roofline,
    "collectives": Collectives,
    "host_copy": HostCopy,
    "cluster": ClusterCostModel,
    "unit": UnitCostModel,
}
