"""transformers.Trainer with a mixture of experts, whose balance is left to the model's own routing."""

import torch
from torch.utils.data import Dataset
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments, set_seed


class D(Dataset):
    def __init__(self, n):
        self.x = torch.randint(3, 60, (n, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "attention_mask": torch.ones(16, dtype=torch.long), "labels": self.x[i]}


set_seed(3)
config = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=16,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=32,
)
model = Qwen3MoeForCausalLM(config)
args = TrainingArguments(
    "out",
    max_steps=8,
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
Trainer(model, args, train_dataset=D(64)).train()
