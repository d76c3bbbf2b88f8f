"""Register over which dims operators sum: where these are cut, the results of pieces add up."""

from lightning_amp.graph.flow import Follows, OperatorCall, sums_over
from lightning_amp.graph.flow_rules import CONVOLUTIONS, is_transposed, reduced_dims

sums_over("sum", "nansum")(lambda call: [[(0, d)] for d in reduced_dims(call)])


@sums_over("matmul", "mm", "bmm")
def _sum_of_products(call: OperatorCall) -> Follows:
    """Columns of the first with rows of the second; what addmm adds would be added with every piece."""
    a, b = call.shapes[:2]
    return [[(0, len(a) - 1), (1, max(len(b) - 2, 0))]]


@sums_over("linear")
def _sum_of_features(call: OperatorCall) -> Follows:
    """Features of the input with the weight's columns; a bias would be added with every piece."""
    return [] if len(call.shapes) > 2 else [[(0, len(call.shapes[0]) - 1), (1, len(call.shapes[1]) - 1)]]


@sums_over(*CONVOLUTIONS)
def _sum_of_channels(call: OperatorCall) -> Follows:
    """Channels of the input with those of the weight, without a bias."""
    alone = len(call.shapes) == 2 and len(call.shapes[0]) == len(call.shapes[1])
    alone = alone and call.arguments.get("groups", 1) == 1
    return [[(0, 1), (1, 1 - int(is_transposed(call)))]] if alone else []


@sums_over("einsum")
def _sum_of_letters(call: OperatorCall) -> Follows:
    """A letter that the result lacks, in all arguments; a dim of size 1 is broadcast."""
    left, arrow, right = str(call.arguments["equation"]).replace(" ", "").partition("->")
    if not arrow or "." in left:
        return []
    places: dict[str, list[tuple[int, int]]] = {}
    for k, part in enumerate(left.split(",")):
        for d, letter in enumerate(part):
            if letter not in right and call.shapes[k][d] != 1:
                places.setdefault(letter, []).append((k, d))
    return list(places.values())
