# ruff: noqa: SIM905 - hundreds of names read better as words than as strings
"""Treatment of Megatron-LM's arguments.

Source: Megatron-LM, August 2026 (commit d98e8a64), megatron/training/arguments.py and the classes whose fields it turns
    into arguments.
"""

from typing import Any

REFUSED = frozenset(
    """
    account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split activation-func-clamp-value
    apply-query-key-layer-scaling apply-residual-connection-post-layernorm apply-wd-to-qk-layernorm batch-size
    bert-embedder-type bert-load bert-no-binary-head biencoder-projection-dim biencoder-shared-query-context-model
    block-data-path cache-mla-latents chat-template checkpoint-activations ckpt-step classes-fraction
    data-args-path data-parallel-random-init data-per-class-fraction dataloader-inter-document-masking
    dataloader-type ddp-average-in-collective ddp-param-name-patterns-for-fp32-local-accumulation
    decoder-num-layers decoder-seq-length decoupled-lr decoupled-min-lr decrease-batch-size-if-needed
    dino-bottleneck-size dino-freeze-last-layer dino-head-hidden-size dino-local-crops-number dino-local-img-size
    dino-norm-last-layer dino-teacher-temp dino-warmup-teacher-temp dino-warmup-teacher-temp-epochs
    disable-dsa-indexer-rotate-activation disable-dsa-indexer-scoring-relu disable-mamba-mem-eff-path
    disable-pad-vocab-size dsa-indexer-head-dim dsa-indexer-k-norm-epsilon dsa-indexer-k-norm-fp32
    dsa-indexer-loss-coeff dsa-indexer-n-heads dsa-indexer-rope-interleaved dsa-indexer-skip-topk-offset
    dsa-indexer-topk dsa-indexer-topk-freq dsa-indexer-use-sparse-loss dsa-kernel-backend embedding-init-method-std
    embedding-path enable-experimental enable-mhc-connections encoder-num-layers encoder-seq-length
    end-weight-decay eod-mask-loss error-injection-rate error-injection-type eval-global-batch-size
    evidence-data-path exit-duration-in-mins exit-interval exp-avg-dtype exp-avg-sq-dtype
    fault-injector-delay-start-iteration fault-injector-fault-delay fault-injector-fault-probabilities
    fault-injector-fault-types fault-injector-mtti-seconds fault-injector-num-ranks fault-injector-offset-seconds
    fault-injector-ranks fault-injector-seed fim-data fim-eod-token fim-fragment-rate fim-middle-token
    fim-no-prefix fim-pad-token fim-prefix-token fim-rate fim-split-sample fim-spm-rate fim-suffix-token
    first-last-layers-bf16 fp16-lm-cross-entropy fp32-residual-connection fp4-format fp4-param-gather
    fp4-quantizer-factory fp4-recipe fp8-output-proj freeze-all-layers full-validation gdp-cutedsl-kernel
    gdp-num-chunk-states-to-recompute gdp-num-householder glu-linear-offset grad-reduce-in-bf16
    grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-entropy-term-weight grpo-filter-groups-with-same-reward
    grpo-group-size grpo-iterations grpo-kl-beta grpo-prompts-per-step head-lr-mult
    heterogeneous-layers-config-encoded-json heterogeneous-layers-config-path hierarchical-context-parallel-sizes
    hybrid-context-parallel hybrid-layer-pattern hybrid-override-pattern hysteresis ict-head-size ict-load img-h
    img-w indexer-batch-size indexer-log-interval init-method-xavier-uniform is-hybrid-model iter-per-epoch
    iterations-to-skip langrl-env-config lion-beta1 lion-beta2 logits-load-decode-threads logits-load-dir
    logits-load-ignore-errors logits-load-kd-loss-alpha logits-load-msc-prefetch-depth logits-load-prefetch-factor
    logits-save-dir logits-save-dtype logits-save-top-k logits-save-top-p logits-save-top-p-min-k loss-scale
    loss-scale-window lr-warmup-init main-grads-dtype main-params-dtype mamba-head-dim
    mamba-inference-conv-states-dtype mamba-inference-ssm-states-dtype mamba-num-groups mamba-num-heads
    mamba-state-dim mamba-training-ssm-states-dtype mask-factor mask-prob mask-type max-seqlen-per-dp-cp-rank
    merge-file mhc-init-gating-factor mhc-num-residual-streams mhc-recompute-layer-num mhc-sinkhorn-iterations
    min-loss-scale model-parallel-size moe-apply-probs-on-input moe-enable-routing-replay
    moe-expert-rank-capacity-factor moe-input-jitter-eps moe-latent-size moe-mlp-glu-interleave-size
    moe-pad-expert-input-to-capacity moe-router-force-biased moe-router-force-load-balancing
    moe-router-quantile-balancing-ema moe-shared-expert-glu-interleave-size moe-token-drop-policy
    moe-upcycling-granularity moe-use-upcycling mrope-section mtp-detach-heads mtp-hsm mtp-hybrid-override-pattern
    mtp-standalone mtp-use-repeated-layer multiple-validation-sets muon-coefficient-type muon-extra-scale-factor
    muon-fp32-matmul-prec muon-momentum muon-nesterov muon-no-split-qkv muon-num-ns-steps muon-scalar-optimizer
    muon-scale-mode muon-tp-mode muon-use-syrk mup-attn-scale-power mup-base-head-dim mup-base-hidden-size
    mup-embedding-mult mup-output-mult mup-width-mult no-data-sharding no-dsa-indexer-rotate-activation
    no-dsa-indexer-scoring-relu no-inference-disable-ep-consensus no-inference-dynamic-batching-prefix-caching
    no-inference-text-gen-server-logging no-inference-use-synchronous-zmq-collectives no-inference-wandb-logging
    no-initialization no-pad-vocab-size no-position-embedding no-rl-inference-logprobs-is-correction
    no-rl-offload-inference-model-weights-when-idle no-rl-partial-rollouts no-rl-persist-cuda-graphs
    no-rl-skip-bos-token no-rl-training-cuda-graphs no-rl-use-sequence-packing no-rl-verify-model-weights-swap
    no-weight-decay-cond-type no-yarn-correction-range-round-to-int null-tokenizer-eod-id null-tokenizer-pad-id
    num-channels num-classes num-layers-at-end-in-bf16 num-layers-at-start-in-bf16 output-bert-embeddings
    output-logit-dtype override-ckpt-iteration override-opt-param-scheduler override-opt_param-scheduler
    padded-vocab-size patch-dim per-dataset-sequences-path per-split-data-args-path perform-rl-step
    phase-transition-iterations pipeline-model-parallel-layout qk-clip qk-clip-alpha qk-clip-threshold qk-l2-norm
    query-in-block-prob quick-geglu rampup-batch-size relative-attention-max-distance
    relative-attention-num-buckets retriever-report-topk-accuracies retriever-score-scaling
    rl-consumption-granularity rl-default-temperature rl-default-top-k rl-default-top-p rl-durable-rollout-bank
    rl-generation-lag rl-importance-sampling-truncation-coef rl-inference-expert-model-parallel-size
    rl-inference-expert-tensor-model-parallel-size rl-inference-logprobs-is-correction
    rl-inference-model-unified-memory-level rl-inference-parsers rl-inference-pipeline-model-parallel-size
    rl-inference-tensor-model-parallel-size rl-kv-cache-management-mode rl-max-inflight-requests
    rl-offload-inference-model-weights-when-idle rl-offload-optimizer-during-inference rl-partial-rollouts
    rl-persist-cuda-graphs rl-profile rl-profile-dir rl-prompts-per-eval rl-rollout-bank-dir
    rl-rollout-bank-max-bytes rl-sequence-packing-algo rl-sequence-packing-max-sequences-per-bin rl-skip-bos-token
    rl-submission-granularity rl-training-cuda-graphs rl-use-sequence-packing rl-verify-model-weights-swap
    rope-type sample-rate sft-tokenizer-prompt-format sgd-momentum short-seq-prob skip-train spec squared-relu
    start-eval-at-iter start-weight-decay step-batch-size-schedule swin-backbone-type te-precision-config-file
    test-mode tiktoken-num-special-tokens tiktoken-pattern titles-data-path tokenizer-hf-no-include-special-tokens
    tokenizer-metadata tokenizer-special-tokens train-sync-interval use-checkpoint-args
    use-checkpoint-opt-param-scheduler use-checkpoint-opt_param-scheduler use-fused-weighted-squared-relu
    use-megatron-fsdp use-mp-args-from-checkpoint-args use-mup use-one-sent-docs use-precision-aware-optimizer
    use-torch-fsdp2 validation-set-names vision-backbone-type vision-pretraining vision-pretraining-type
    vocab-extra-ids vocab-file warmup weight-decay-incr-style yaml-cfg yarn-correction-range-round-to-int
    """.split()
)
"""Arguments that change what is trained and have no equivalent."""
WITHOUT_EFFECT = frozenset(
    """
    accumulate-allreduce-grads-in-fp32 activation-offload-fraction adlr-autoresume adlr-autoresume-interval
    allow-ambiguous-pad-tokens app-tag-run-name app-tag-run-version async-ckpt-cpu-priority async-ckpt-io-priority
    async-ckpt-use-cpu-shm async-strategy attention-backend attention-softmax-in-fp32 auto-detect-ckpt-format
    batch-invariant-backend batch-invariant-mode calc-ft-timeouts check-for-large-grads check-for-spiky-loss
    check-weight-hash-across-dp-replicas-interval ckpt-assume-constant-structure ckpt-convert-format
    ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format ckpt-drop-redundant-extra-state ckpt-format
    ckpt-fully-parallel-load ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-load-per-rank-objects
    ckpt-fully-parallel-load-process-group ckpt-fully-parallel-save ckpt-fully-parallel-save-process-group
    ckpt-pg-tensors-cache-create ckpt-pg-tensors-cache-path config-logger-dir
    cpu-offloading-retain-pinned-cpu-buffers create-all-gather-group cross-entropy-fusion-impl
    cross-entropy-loss-fusion cuda-graph-impl cuda-graph-modules cuda-graph-scope cuda-graph-warmup-steps
    data-cache-path data-parallel-sharding-strategy dataloader-defer-npy-index-mmap dataloader-fast-cache-load
    ddp-bucket-size ddp-num-buckets ddp-pad-buckets-for-high-nccl-busbw ddp-reduce-scatter-with-fp32-accumulation
    decode-only-cuda-graphs defer-embedding-wgrad-compute delay-offload-until-cuda-graph delay-wgrad-compute
    delta-offload-bytes-across-pp-ranks disable-align-grad-reduce disable-bf16-reduced-precision-matmul
    disable-ckpt-load-validate-sharding-integrity disable-clone-scatter-output-in-embedding
    disable-flight-recorder-dump-on-timeout disable-flight-recorder-extra-dump-on-exec
    disable-flight-recorder-include-only-active disable-fp8-wgrad disable-gloo-process-groups disable-jit-fuser
    disable-log-loss-scale-to-tensorboard disable-manual-gc-eval disable-msc disable-save-tokenizer-assets
    disable-straggler-on-startup disable-strict-fsdp-dtensor-load disable-symmetric-registration
    disable-tokenizer-sentencepiece-ignore-extra-whitespaces disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad
    disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-split-ag disable-tp-comm-split-rs
    disable-use-tokenizer-model-from-checkpoint-args dist-ckpt-format dist-ckpt-optim-fully-reshardable
    dist-ckpt-save-pre-mcore-014 dist-ckpt-strictness dist-ckpt-workers
    distrib-optim-fully-reshardable-mem-efficient distribute-saved-activations distributed-backend
    distributed-timeout-seconds-after-init dump-param-to-param-group-map empty-unused-memory-level
    enable-chunked-prefill enable-cuda-graph enable-ft-package enable-full-sharding-in-hsdp enable-msc
    ep-overlap-early-attn-memory-release eval-micro-batch-size exit-on-missing-checkpoint exit-signal
    exit-signal-handler exit-signal-handler-for-dataloader exit-signal-handler-for-training
    expert-tensor-parallel-num-weight-shards external-cuda-graph fake-process-group
    fine-grained-activation-offloading fine-grained-offloading-max-inflight-offloads flash-attention-version
    flash-decode flight-recorder-dump-path flight-recorder-include-stack-trace flight-recorder-trace-buffer-size
    fp8-amax-compute-algo fp8-amax-history-len fp8-interval fp8-margin fp8-param-gather fp8-quantizer-factory
    fsdp-db-use-persist-buf-on-alloc-fail fsdp-double-buffer fsdp-manual-registration ft-num-warmup-iters
    fused-residual-rmsnorm gpu-sniff-test-interval gtp-expert-remat-nccl-ub gtp-remat-nccl-ub
    gtp-remat-opt-in-modules gtp-remat-reduce-scatter-with-fp32-accumulation high-priority-a2a-comm-stream
    high-priority-stream-groups inference-batch-times-seqlen-threshold inference-coordinator-port
    inference-cuda-graph-all-prefills inference-cuda-graph-max-tokens inference-cuda-graph-scope
    inference-disable-ep-consensus inference-disable-triton-nvls-kernels inference-dynamic-batching
    inference-dynamic-batching-async-sched-mode inference-dynamic-batching-block-size
    inference-dynamic-batching-buffer-size-gb inference-dynamic-batching-cuda-graph-mixed-prefill-count
    inference-dynamic-batching-cuda-graph-sizing-distribution inference-dynamic-batching-logprobs-mode
    inference-dynamic-batching-mamba-memory-ratio inference-dynamic-batching-max-requests
    inference-dynamic-batching-max-tokens inference-dynamic-batching-num-cuda-graphs
    inference-dynamic-batching-paused-buffer-size-gb inference-dynamic-batching-prefix-caching
    inference-dynamic-batching-prefix-caching-coordinator-policy
    inference-dynamic-batching-prefix-caching-eviction-policy inference-dynamic-batching-prefix-caching-mamba-gb
    inference-dynamic-batching-prefix-caching-routing-alpha inference-dynamic-batching-sampling-backend
    inference-dynamic-batching-track-generated-token-events inference-dynamic-batching-track-paused-request-events
    inference-dynamic-batching-unified-memory-level inference-fuse-tp-communication inference-grouped-gemm-backend
    inference-logging-step-interval inference-max-requests inference-max-seq-length
    inference-moe-disable-fused-quant-kernels inference-moe-token-dispatcher-type inference-rng-tracker
    inference-shards inference-text-gen-server-logging inference-use-synchronous-zmq-collectives
    inference-wandb-logging init-model-with-meta-device inprocess-active-world-size inprocess-barrier-timeout
    inprocess-completion-timeout inprocess-empty-cuda-cache inprocess-granularity inprocess-hard-timeout
    inprocess-heartbeat-interval inprocess-heartbeat-timeout inprocess-last-call-wait inprocess-max-iterations
    inprocess-monitor-process-interval inprocess-monitor-thread-interval inprocess-progress-watchdog-interval
    inprocess-restart inprocess-soft-timeout inprocess-termination-grace-time keep-fp8-transpose-cache
    kitchen-attention-backend lazy-mpu-init load-main-params-from-ckpt local-rank log-device-memory-used log-energy
    log-max-attention-logit log-memory-interval log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm
    log-progress log-straggler log-throughput log-timers-to-tensorboard log-validation-ppl-to-tensorboard
    log-world-size-to-tensorboard logging-level manual-gc manual-gc-interval max-tokens-to-oom
    megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-grad-comm-dtype megatron-fsdp-main-grads-dtype
    megatron-fsdp-main-params-dtype megatron-fsdp-max-pool-double-buffer megatron-fsdp-version memory-snapshot-path
    microbatch-group-size-per-virtual-pipeline-stage mid-level-dataset-surplus min-offloaded-tensor-size
    mla-down-proj-fusion mlp-chunks-for-prefill mlp-chunks-for-training moe-combine-bwd-dtype moe-deepep-num-sms
    moe-dispatch-fwd-dtype moe-enable-deepep moe-flex-dispatcher-backend moe-flex-dispatcher-num-sms
    moe-grouped-gemm moe-hybridep-num-blocks-permute moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms
    moe-hybridep-num-sms-preprocessing moe-hybridep-pad-uneven-dispatch-inputs moe-layer-recompute
    moe-ncclep-zero-copy moe-pad-experts-for-cuda-graph-inference moe-paged-stash
    moe-paged-stash-buffer-size-factor-cpu moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-page-size
    moe-per-layer-logging moe-permute-fusion moe-permute-fusion-into-hybridep moe-router-dtype moe-router-fusion
    moe-router-padding-for-fp8 moe-router-padding-for-quantization moe-routing-trace-capture-hidden-states
    moe-routing-trace-capture-logits moe-routing-trace-dump-weights moe-routing-trace-max-training-iters
    moe-routing-trace-path moe-shared-expert-overlap moe-single-grouped-bias moe-single-grouped-weight
    moe-use-grouped-tensor nccl-all-reduce-for-prefill nccl-communicator-config-path no-align-grad-reduce
    no-align-param-gather no-barrier-with-level-1-timing no-bias-dropout-fusion no-bias-swiglu-fusion
    no-check-for-nan-in-loss-and-grad no-ckpt-fully-parallel-save no-ckpt-load-validate-sharding-integrity
    no-clone-scatter-output-in-embedding no-create-attention-mask-in-dataloader no-flight-recorder-dump-on-timeout
    no-flight-recorder-extra-dump-on-exec no-flight-recorder-include-only-active no-fp8-wgrad
    no-gradient-accumulation-fusion no-gradient-reduce-div-fusion no-load-optim no-load-rng
    no-log-loss-scale-to-tensorboard no-manual-gc-eval no-masked-softmax-fusion no-mmap-bin-files no-one-logger
    no-overlap-p2p-communication no-persist-layer-norm no-pin-cpu-grads no-pin-cpu-params no-rope-fusion
    no-save-optim no-save-rng no-save-tokenizer-assets no-strict-fsdp-dtensor-load
    no-tokenizer-sentencepiece-ignore-extra-whitespaces no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad
    no-tp-comm-overlap-ag no-tp-comm-overlap-rs no-tp-comm-split-ag no-tp-comm-split-rs
    no-use-layer-wise-param-layout no-use-tokenizer-model-from-checkpoint-args non-persistent-ckpt-type
    non-persistent-global-ckpt-dir non-persistent-local-ckpt-algo non-persistent-local-ckpt-dir
    non-persistent-save-interval num-dataset-builder-threads num-distributed-optimizer-instances
    num-speculative-tokens num-workers nvtx-ranges object-storage-cache-path offload-modules one-logger-async
    one-logger-project one-logger-run-name onnx-safe optimizer-cuda-graph optimizer-offload-fraction otel-enabled
    otel-service-name otel-span-groups outer-dp-sharding-strategy overlap-cpu-optimizer-d2h-h2d
    overlap-dispatch-backward-with-experts-wgrad overlap-moe-expert-parallel-comm
    overlap-p2p-communication-warmup-flush overlap-param-gather-with-optimizer-step
    pipeline-model-parallel-comm-backend pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra
    pytorch-profiler-collect-shapes record-memory-history record-shapes refit-method replication replication-factor
    replication-jump rerun-mode result-rejected-tracker-filename reuse-grad-buf-for-mxfp8-param-ag
    run-workload-inspector-server save-activations-interval save-dgrads-interval save-params-interval
    save-tokens-per-expert-interval save-wgrads-interval sharp-enabled-group straggler-ctrlr-port
    straggler-minmax-count suggested-communication-unit-size symmetric-ar-type te-rng-tracker
    tensor-parallel-num-weight-shards tensorboard-log-interval tensorboard-queue-size timing-log-level
    timing-log-option tokenizer-hf-no-use-fast tokenizer-sentencepiece-legacy torch-fsdp2-no-reshard-after-forward
    tp-comm-bootstrap-backend tp-comm-overlap tp-comm-overlap-cfg tp-comm-overlap-rs-dgrad trust-remote-code
    use-cpu-initialization use-dist-ckpt use-flash-attn use-gigatoken use-grouped-gemm-for-dense-mlp
    use-grouped-gemm-for-shared-expert use-kitchen-attention use-legacy-static-engine use-mcore-models use-nccl-ub
    use-persistent-ckpt-worker use-pytorch-profiler use-ring-exchange-p2p use-same-sampling-seed-across-dp-ranks
    use-sharp use-te-activation-func use-torch-optimizer-for-cpu-offload use-tp-pp-dp-mapping
    use-transformer-engine-op-fuser verify-integrity wandb-entity wandb-save-dir wgrad-deferral-limit
    """.split()
)
"""Arguments that do not change what is trained: kernels, transfers, logs, checkpoints of a process, inference."""
VALUES: dict[str, tuple[str, Any]] = {
    "num-layers": ("model.num_layers", None),
    "hidden-size": ("model.hidden_size", None),
    "num-attention-heads": ("model.num_attention_heads", None),
    "kv-channels": ("model.head_dim", None),
    "vocab-size": ("model.vocab_size", None),
    "no-rope-freq": ("model.megatron.no_rope_freq", None),
    "tensor-model-parallel-size": ("layout.tp", None),
    "pipeline-model-parallel-size": ("layout.pp", None),
    "context-parallel-size": ("layout.cp", None),
    "expert-model-parallel-size": ("layout.ep", None),
    "num-virtual-stages-per-pipeline-rank": ("layout.vpp", None),
    "decoder-first-pipeline-num-layers": ("layout.first_stage_layers", None),
    "decoder-last-pipeline-num-layers": ("layout.last_stage_layers", None),
    "micro-batch-size": ("train.micro_batch_size", None),
    "global-batch-size": ("train.global_batch_size", None),
    "train-iters": ("train.num_steps", None),
    "lr": ("optimizer.lr", None),
    "lr-decay-iters": ("optimizer.decay_steps", None),
    "lr-warmup-iters": ("optimizer.warmup_steps", None),
    "seq-length": ("data.seq_length", None),
    "tokenizer-model": ("data.tokenizer", None),
    "save": ("run.dir", None),
    "save-retain-interval": ("checkpoint.keep_every_steps", None),
    "wandb-exp-name": ("run.name", None),
    "mtp-num-layers": ("model.mtp_depths", None),
    "seed": ("train.seed", 1234),
    "norm-epsilon": ("model.norm_epsilon", 1e-5),
    "init-method-std": ("model.init_std", 0.02),
    "make-vocab-size-divisible-by": ("model.vocab_multiple", 128),
    "hidden-dropout": ("model.hidden_dropout", 0.1),
    "attention-dropout": ("model.attention_dropout", 0.1),
    "min-lr": ("optimizer.min_lr", 0.0),
    "weight-decay": ("optimizer.weight_decay", 0.01),
    "clip-grad": ("optimizer.clip_grad", 1.0),
    "adam-beta1": ("optimizer.beta1", 0.9),
    "adam-beta2": ("optimizer.beta2", 0.999),
    "adam-eps": ("optimizer.epsilon", 1e-8),
    "log-interval": ("metrics.console_interval_steps", 100),
}
"""Argument -> key with the same value, and Megatron-LM's default."""
SWITCHES = {
    "qk-layernorm": "model.qk_norm",
    "add-qkv-bias": "model.qkv_bias",
    "apply-layernorm-1p": "model.zero_centered_norm",
    "attention-output-gate": "model.attention_gate",
    "rotary-interleaved": "model.rope.interleaved",
    "sequence-parallel": "layout.sp",
    "overlap-grad-reduce": "train.overlap_grad_reduce",
    "overlap-param-gather": "train.overlap_param_gather",
    "deterministic-mode": "train.deterministic",
    "optimizer-cpu-offload": "train.offload_optimizer",
}
"""Flag -> key that it sets to true."""
LATENT_ATTENTION = {
    "q-lora-rank": ("model.mla.q_lora_rank", None),
    "kv-lora-rank": ("model.mla.kv_lora_rank", 32),
    "qk-head-dim": ("model.mla.qk_nope_head_dim", 128),
    "qk-pos-emb-head-dim": ("model.mla.qk_rope_head_dim", 64),
    "v-head-dim": ("model.mla.v_head_dim", 128),
}
"""Argument of --multi-latent-attention -> key and default."""
DELTA_NET = {
    "linear-num-key-heads": ("model.delta_net.num_key_heads", 16),
    "linear-num-value-heads": ("model.delta_net.num_value_heads", 32),
    "linear-key-head-dim": ("model.delta_net.key_head_dim", 128),
    "linear-value-head-dim": ("model.delta_net.value_head_dim", 128),
    "linear-conv-kernel-dim": ("model.delta_net.conv_kernel", 4),
    "linear-attention-freq": ("model.delta_net.full_attention_every", None),
}
"""Argument of --experimental-attention-variant gated_delta_net -> key and default."""
EXPERTS = {
    "num-experts": ("model.experts.num_experts", None),
    "moe-router-topk": ("model.experts.top_k", 2),
    "moe-shared-expert-intermediate-size": ("model.experts.shared_ffn_hidden_size", None),
    "moe-router-score-function": ("model.experts.score", "softmax"),
    "moe-router-num-groups": ("model.experts.num_groups", None),
    "moe-router-group-topk": ("model.experts.group_top_k", None),
    "moe-router-topk-scaling-factor": ("model.experts.scaling_factor", None),
    "moe-expert-capacity-factor": ("model.experts.capacity_factor", None),
    "moe-z-loss-coeff": ("loss.router.z_coefficient", None),
}
"""Argument of --num-experts -> key and default."""
BALANCE = {
    "aux_loss": "loss.router.microbatch_balance_coefficient",
    "seq_aux_loss": "loss.router.sequence_balance_coefficient",
    "global_aux_loss": "loss.router.global_balance_coefficient",
}
"""Kind of load balancing -> key of its coefficient."""
FLAGS = frozenset(SWITCHES) | frozenset(
    """
    async-save bf16 calculate-per-token-loss disable-bias-linear finetune fp16 group-query-attention mock-data
    moe-router-enable-expert-bias moe-router-pre-softmax moe-shared-expert-gate multi-latent-attention
    no-bias-gelu-fusion openai-gelu profile recompute-activations reset-attention-mask reset-position-ids sft swiglu
    untie-embeddings-and-output-weights use-distributed-optimizer use-rope-scaling use-rotary-position-embeddings
    """.split()
)
"""Translated arguments without a value."""
TRANSLATED = FLAGS.union(VALUES, LATENT_ATTENTION, DELTA_NET, EXPERTS) | frozenset(
    """
    cp-comm-type cpu-offloading-num-layers data-path distributed-timeout-minutes eval-interval eval-iters
    experimental-attention-variant expert-tensor-parallel-size ffn-hidden-size fp8-format fp8-recipe initial-loss-scale
    load lr-decay-samples lr-decay-style lr-warmup-fraction lr-warmup-samples lr-wsd-decay-iters lr-wsd-decay-samples
    lr-wsd-decay-style max-position-embeddings moe-aux-loss-coeff moe-ffn-hidden-size moe-layer-freq
    moe-router-bias-update-rate moe-router-load-balancing-type moe-token-dispatcher-type mscale mscale-all-dim
    mtp-loss-scaling-factor normalization num-layers-per-virtual-pipeline-stage num-query-groups optimizer
    persistent-save-interval position-embedding-type pretrained-checkpoint profile-ranks profile-step-end
    profile-step-start recompute-granularity recompute-method recompute-modules recompute-num-layers rope-scaling-factor
    rotary-base rotary-percent rotary-scaling-factor rotary-seq-len-interpolation-factor save-interval softmax-type
    split tensorboard-dir test-data-path tokenizer-type train-data-path train-samples transformer-impl valid-data-path
    wandb-project window-attn-skip-freq window-size yarn-beta-fast yarn-beta-slow yarn-original-max-position-embeddings
    """.split()
)
"""Arguments that `megatron_lm.py` reads."""
