"""Log-probabilities and entropies of TRL's heads, and its distillation losses over the whole vocabulary and top-k."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from cases_trl_trainer import case, stand_in

from rlkit.losses import (
    forward_kl_loss,
    jsd_loss,
    linear_logprobs,
    reinforce_loss,
    reverse_kl_loss,
    sequence_mean,
    sum_pi_squared,
    target_logprobs,
    token_entropy,
    token_mean,
    topk_forward_kl_loss,
    topk_reverse_kl_loss,
)

B, T, V, H, K = 6, 7, 12, 5, 4


def logits(g):
    length = torch.randint(3, T + 1, (B, 1), generator=g)
    mask = torch.arange(T) < length
    mask[0, 2:4] = False
    return {
        "logits": 1.5 * torch.randn(B, T, V, generator=g),
        "teacher_logits": 1.5 * torch.randn(B, T, V, generator=g),
        "tokens": torch.randint(0, V, (B, T), generator=g),
        "mask": mask,
    }


def hidden(g):
    made = logits(g)
    return {
        "hidden": torch.randn(B, T, H, generator=g),
        "weight": torch.randn(V, H, generator=g),
        "bias": torch.randn(V, generator=g),
        "teacher_hidden": torch.randn(B, T, H, generator=g),
        "teacher_weight": torch.randn(V, H, generator=g),
        "tokens": made["tokens"],
        "mask": made["mask"],
    }


def served(g):
    """What a teacher's server sends: its K likeliest tokens, of which some positions have fewer."""
    made = logits(g)
    logprobs, indices = made.pop("teacher_logits").log_softmax(-1).topk(K)
    logprobs[::2, :, K - 1] = -torch.inf
    return made | {"teacher_logprobs": logprobs, "teacher_indices": indices}


def selected(logits, tokens, **_):
    from trl.trainer.utils import selective_log_softmax

    return {"out": selective_log_softmax(logits, tokens, temperature=0.7)}


def selected_and_entropy(logits, tokens, **_):
    from trl.trainer.utils import selective_log_softmax_and_entropy

    logprobs, entropy = selective_log_softmax_and_entropy(logits, tokens, temperature=0.7)
    return {"logprobs": logprobs, "entropy": entropy}


def entropies(logits, **_):
    from trl.trainer.utils import entropy_from_logits

    return {"out": entropy_from_logits(logits, chunk_size=5)}


def fused_head(hidden, weight, bias, tokens, mask, **_):
    """A model with TRL's fused head and nothing before it."""
    from trl.trainer.utils import add_fused_lm_head

    config = SimpleNamespace(model_type="stand-in")
    config.get_text_config = lambda: config
    model = torch.nn.Module()
    model.config = config
    model.base_model = lambda **_: SimpleNamespace(last_hidden_state=hidden)
    model.get_output_embeddings = lambda: SimpleNamespace(weight=weight, bias=bias)
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy", "log_sum_sq_probs"))
    made = model.forward(labels=tokens.masked_fill(~mask, -100), fused_lm_head=True)
    return {"logprobs": made.log_probs, "entropy": made.entropy, "sum_squared": made.log_sum_sq_probs}


def gkd(**options):
    def peer(logits, teacher_logits, tokens, mask):
        from trl.experimental.gkd import GKDTrainer

        labels = tokens.masked_fill(~mask, -100)
        return {"out": GKDTrainer.generalized_jsd_loss(logits, teacher_logits, labels, **options)}

    return peer


def gkd_step(logits, teacher_logits, tokens, mask):
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    trainer = stand_in(GKDTrainer, GKDConfig, beta=0.3)
    trainer.teacher_model = torch.nn.Module()
    trainer.teacher_model.forward = lambda **_: SimpleNamespace(logits=teacher_logits)
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(~mask, -100)}
    return {"out": trainer.compute_loss(lambda **_: SimpleNamespace(logits=logits), batch)}


def chunked(beta):
    def peer(hidden, weight, bias, teacher_hidden, teacher_weight, mask, **_):
        from trl.trainer.distillation_trainer import _chunked_divergence_loss

        loss, entropy, _ = _chunked_divergence_loss(
            hidden, teacher_hidden, weight, teacher_weight, mask, beta, student_lm_head_bias=bias, temperature=1.5
        )
        return {"out": loss, "entropy": entropy}

    return peer


def iw_opd_topk(**options):
    def peer(logits, teacher_logits, tokens, mask):
        from trl.experimental.iw_opd import IWOPDTrainer

        labels = tokens.masked_fill(~mask, -100)
        return {"out": IWOPDTrainer.generalized_jsd_loss(logits, teacher_logits, labels, top_k=K, **options)}

    return peer


def iw_opd(logits, teacher_logits, tokens, mask):
    from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

    trainer = stand_in(IWOPDTrainer, IWOPDConfig, iw_opd_gamma=0.0, temperature=1.0)
    teacher = teacher_logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return {"out": trainer._compute_iw_opd_loss(logits, tokens, tokens.masked_fill(~mask, -100), teacher)}


def server_trainer(**options):
    from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

    options = {"teacher_model_server_url": "http://nowhere"} | options
    return stand_in(ServerDistillationTrainer, ServerDistillationConfig, **options)


def server_topk(logits, tokens, mask, teacher_logprobs, teacher_indices):
    trainer = server_trainer(beta=0.0, loss_top_k=K)
    sent = {"topk_logprobs": teacher_logprobs, "topk_token_ids": teacher_indices}
    labels = tokens.masked_fill(~mask, -100)
    return {"out": trainer._compute_server_forward_kl_loss(sent, logits.log_softmax(-1), labels)}


def server_sampled(logits, teacher_logits, tokens, mask):
    teacher = teacher_logits.log_softmax(-1)
    (first, token), sampled = teacher.max(-1), teacher.gather(-1, tokens[..., None])[..., 0]
    given = (logits.log_softmax(-1), token, first, tokens, sampled, tokens.masked_fill(~mask, -100))
    return {"out": server_trainer(beta=1.0)._compute_sparse_top_1_divergence_loss(*given)}


def self_distillation(mode, alpha, **options):
    def peer(logits, teacher_logits, tokens, mask):
        from trl.experimental.sdft import SDFTConfig, SDFTTrainer
        from trl.experimental.sdft.sdft_trainer import DistillationLogits

        trainer = stand_in(
            SDFTTrainer, SDFTConfig, distillation_mode=mode, distillation_alpha=alpha, distillation_topk=K, **options
        )
        trainer._log_self_distillation_metric = lambda *_: None
        made = DistillationLogits(
            completion_ids=tokens, loss_mask=mask.long(), student_logits=logits, teacher_logits=teacher_logits
        )
        return {"out": trainer._compute_self_distillation_loss(trainer.model, {}, made)}

    return peer


def head(x):
    """Every position but the last against the next token."""
    logprobs, entropy = linear_logprobs(
        x.hidden[:, :-1].reshape(-1, H), x.weight, x.tokens[:, 1:].reshape(-1), 0.7, bias=x.bias, chunk=7
    )
    keep = x.mask[:, 1:]
    squared = sum_pi_squared(x.hidden[:, :-1] @ x.weight.T + x.bias, 0.7).log()
    return {
        "logprobs": torch.where(keep, logprobs.view(B, -1), 0.0),
        "entropy": torch.where(keep, entropy.view(B, -1), 0.0),
        "sum_squared": torch.where(keep, squared, 0.0),
    }


def divergence(formula, **options):
    return lambda x: token_mean(formula(x.logits, x.teacher_logits, x.mask, **options), x.mask)


def of_heads(formula, **options):
    def ours(x):
        student = x.hidden @ x.weight.T + x.bias
        loss = formula(student, x.teacher_hidden @ x.teacher_weight.T, x.mask, temperature=1.5, **options)
        entropy = torch.where(x.mask, token_entropy(student.detach(), 1.5), 0.0).sum()
        return {"out": token_mean(loss, x.mask), "entropy": entropy}

    return ours


def top(formula, by="teacher_logits", reduce=token_mean):
    """Ours over the K likeliest tokens of the teacher or of the student, the rest in one bucket."""

    def ours(x):
        indices = getattr(x, by).topk(K).indices
        teacher = x.teacher_logits.log_softmax(-1).gather(-1, indices)
        return reduce(formula(x.logits, teacher, indices, x.mask), x.mask)

    return ours


def renormalised(formula, by="teacher_logits", reduce=token_mean):
    def ours(x):
        indices = getattr(x, by).topk(K).indices
        return reduce(formula(x.logits.gather(-1, indices), x.teacher_logits.gather(-1, indices), x.mask), x.mask)

    return ours


def sampled(x):
    """REINFORCE on sampled tokens, whose advantage is the teacher's log-probability less the student's."""
    student, teacher = (target_logprobs(y, x.tokens) for y in (x.logits, x.teacher_logits))
    return reinforce_loss(student, student, teacher - student, x.mask)


def shifted(x):
    mask = F.pad(x.mask[:, 1:], (0, 1))
    return token_mean(jsd_loss(x.logits, x.teacher_logits, mask, beta=0.3), mask)


def of_sampled_token(x):
    teacher = x.teacher_logits.log_softmax(-1).gather(-1, x.tokens[..., None])
    return token_mean(topk_reverse_kl_loss(x.logits, teacher, x.tokens[..., None], x.mask), x.mask)


STUDENT = "TRL takes the student's likeliest tokens, ours those it is given."
LOGITS, HEAD = ("logits",), ("hidden", "weight", "bias")
CASES = [
    case("selective_log_softmax", logits, selected, lambda x: target_logprobs(x.logits, x.tokens, 0.7), LOGITS),
    case("entropy_from_logits", logits, entropies, lambda x: token_entropy(x.logits), LOGITS),
    case(
        "selective_log_softmax_and_entropy",
        logits,
        selected_and_entropy,
        lambda x: {
            "logprobs": target_logprobs(x.logits, x.tokens, 0.7),
            "entropy": token_entropy(x.logits, 0.7),
        },
        LOGITS,
    ),
    case(
        "fused_lm_head",
        hidden,
        fused_head,
        head,
        HEAD,
        "TRL's entropy is a difference of two sums, ten times less exact: it needs the wider tolerance.",
        atol=2e-5,
    ),
    *(
        case(f"gkd_jsd_{beta}", logits, gkd(beta=beta), divergence(jsd_loss, beta=beta), LOGITS)
        for beta in (0.1, 0.5, 0.9)
    ),
    case(
        "gkd_jsd_tempered",
        logits,
        gkd(beta=0.3, temperature=2.0),
        divergence(jsd_loss, beta=0.3, temperature=2.0),
        LOGITS,
    ),
    case("gkd_forward", logits, gkd(beta=0, temperature=2.0), divergence(forward_kl_loss, temperature=2.0), LOGITS),
    case("gkd_reverse", logits, gkd(beta=1, temperature=2.0), divergence(reverse_kl_loss, temperature=2.0), LOGITS),
    case("gkd_step", logits, gkd_step, shifted, LOGITS),
    case("distillation_jsd", hidden, chunked(0.3), of_heads(jsd_loss, beta=0.3), HEAD),
    case("distillation_forward", hidden, chunked(0.0), of_heads(forward_kl_loss), HEAD),
    case("distillation_reverse", hidden, chunked(1.0), of_heads(reverse_kl_loss), HEAD),
    case("topk_forward", logits, iw_opd_topk(beta=0), top(topk_forward_kl_loss), LOGITS),
    case(
        "topk_forward_renormalised",
        logits,
        iw_opd_topk(beta=0, add_tail=False),
        renormalised(forward_kl_loss),
        LOGITS,
    ),
    case("topk_reverse", logits, iw_opd_topk(beta=1), top(topk_reverse_kl_loss, "logits"), LOGITS, STUDENT),
    case(
        "topk_forward_of_a_server",
        served,
        server_topk,
        lambda x: token_mean(topk_forward_kl_loss(x.logits, x.teacher_logprobs, x.teacher_indices, x.mask), x.mask),
        LOGITS,
    ),
    case(
        "top1_reverse_of_a_server",
        logits,
        server_sampled,
        of_sampled_token,
        LOGITS,
        "TRL takes the one token that the student sampled, ours those it is given.",
    ),
    case(
        "sdft_topk_forward",
        logits,
        self_distillation("topk_logits", 0.0, distillation_add_tail=True),
        top(topk_forward_kl_loss, "logits", sequence_mean),
        LOGITS,
        STUDENT,
    ),
    case(
        "sdft_topk_reverse",
        logits,
        self_distillation("topk_logits", 1.0, distillation_add_tail=True),
        top(topk_reverse_kl_loss, "logits", sequence_mean),
        LOGITS,
        STUDENT,
    ),
    case(
        "sdft_topk_renormalised",
        logits,
        self_distillation("topk_logits", 0.5),
        renormalised(jsd_loss, "logits", sequence_mean),
        LOGITS,
        STUDENT,
    ),
    case(
        "sdft_full",
        logits,
        self_distillation("full_logits", 0.3),
        lambda x: sequence_mean(jsd_loss(x.logits, x.teacher_logits, x.mask, beta=0.3), x.mask),
        LOGITS,
    ),
    case(
        "sdft_sampled_token",
        logits,
        self_distillation("sampled_token", 1.0),
        lambda x: sequence_mean(sampled(x), x.mask),
        LOGITS,
    ),
    case("iw_opd_unweighted", logits, iw_opd, lambda x: token_mean(sampled(x), x.mask), LOGITS),
]
