"""Which tokens are in which row of which step: token shard, data plan, stream of documents, packing, order.

token_shard → data_plan → document_stream (permutation) → packing → data_order
"""
