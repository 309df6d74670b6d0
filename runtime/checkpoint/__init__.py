"""Checkpoints on torch.distributed.checkpoint that any layout loads and no crash loses; Hugging Face in and out.

contents.py       which ranges of which tensors this rank writes or reads; shards.py: such a range as boxes
saver.py          when, in the background or not; write.py: the files, the manifest, the rename
folder.py         RUN/checkpoints: slots, retention, order; find.py: the newest that is whole
load.py           fills a model and its optimizer; hugging_face.py: the same from safetensors; export.py: the way back
storage.py        DCP's files, with checksums; manifest.py: what else a checkpoint knows
"""
