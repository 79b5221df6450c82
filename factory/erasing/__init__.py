"""The text of removed documents is overwritten: ``erasing`` says where and in which order, ``rewriting`` makes a shard's file again without rows."""
