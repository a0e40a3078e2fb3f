"""A small GPT over bytes: ordinary PyTorch and Lightning, without any use of lightning-cephalo."""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, both pre-norm and residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention_out(self.attend(self.attention_norm(hidden)))
        return hidden + self.feed_forward(hidden)

    def attend(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        by_head = self.query_key_value(hidden).view(batch, length, 3, self.heads, -1)
        query, key, value = by_head.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, length, width)


class ByteGPT(nn.Module):
    """Maps bytes ``(batch, length)`` to logits of each next byte ``(batch, length, 256)``."""

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self.initialize)
        for block in self.blocks:
            for into_residual in (block.attention_out, block.feed_forward[-1]):
                nn.init.normal_(into_residual.weight, std=0.02 / (2 * depth) ** 0.5)

    @staticmethod
    def initialize(module: nn.Module) -> None:
        # as in GPT-2: PyTorch's defaults are too large for tied embeddings and learn more slowly
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens) + self.position(places)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class ByteLanguageModel(LightningModule):
    """Learns to predict the next byte; the losses are in nats per byte."""

    def __init__(
        self,
        width: int = 192,
        depth: int = 7,
        heads: int = 6,
        context: int = 128,
        learning_rate: float = 1e-3,
        warmup_steps: int = 10,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = ByteGPT(width, depth, heads, context)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, following = batch
        return F.cross_entropy(self.network(tokens).flatten(0, 1), following.flatten())

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.hparams.learning_rate, betas=(0.9, 0.95), fused=True
        )
        warmup = torch.optim.lr_scheduler.LinearLR(
            optimizer, start_factor=0.1, total_iters=self.hparams.warmup_steps
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}

    def configure_model(self) -> None:
        """Shard evenly under Lightning's ModelParallelStrategy.

        That strategy leaves sharding to the module. Only the comparison needs this; the other
        strategies set no device mesh.
        """
        if self.device_mesh is None:
            return
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if isinstance(self.network, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.network.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.network, mesh=mesh)
