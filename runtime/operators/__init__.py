"""torch.ops.normforge, what a traced call becomes, with gradients. Stands on calls/."""
