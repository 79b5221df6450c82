"""The data of each step, down to the tokens of a row: token shard, data plan, stream of documents, packing, order.

token_shard → data_plan → document_stream (permutation) → packing → data_order
"""
