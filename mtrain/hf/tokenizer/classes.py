"""The class that transformers chooses for a folder, and the tokenizer that it builds from its vocabulary.

A generic class takes tokenizer.json as it is. Others build normalizer, pre-tokenizer and model in code, and take only
vocabulary, merges and post-processor from the file. Known ones are rebuilt here.

Source: transformers 5.24, models/auto/tokenization_auto.py (AutoTokenizer.from_pretrained) and the classes' own files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_CLASSES = {
    "AlbertTokenizer": "albert yoso",
    "BartTokenizer": "florence2",
    "BarthezTokenizer": "barthez",
    "BartphoTokenizer": "bartpho",
    "BertGenerationTokenizer": "bert-generation",
    "BertJapaneseTokenizer": "bert-japanese",
    "BertTokenizer": (
        "align bark bert blip bros chinese_clip convbert distilbert electra ernie flava git grounding-dino "
        "layoutlm megatron-bert mm-grounding-dino nezha nomic_bert qdqbert realm retribert squeezebert tvp vilt "
        "visual_bert"
    ),
    "BertweetTokenizer": "bertweet",
    "BigBirdTokenizer": "big_bird",
    "BioGptTokenizer": "biogpt",
    "BlenderbotSmallTokenizer": "blenderbot-small",
    "BlenderbotTokenizer": "blenderbot",
    "ByT5Tokenizer": "byt5",
    "CLIPTokenizer": "aimv2 clip clipseg groupvit omdet-turbo oneformer owlv2 owlvit sam3 sam3_video xclip",
    "CTRLTokenizer": "ctrl",
    "CamembertTokenizer": "camembert",
    "CanineTokenizer": "canine",
    "ClvpTokenizer": "clvp",
    "CodeLlamaTokenizer": "code_llama",
    "CohereTokenizer": "aya_vision cohere cohere2",
    "CpmAntTokenizer": "cpmant",
    "CpmTokenizer": "cpm",
    "DPRQuestionEncoderTokenizer": "dpr",
    "DebertaTokenizer": "deberta",
    "DebertaV2Tokenizer": "deberta-v2",
    "DiaTokenizer": "dia",
    "EsmTokenizer": "esm",
    "EsmcTokenizer": "esmc esmfold2",
    "FNetTokenizer": "fnet",
    "FSMTTokenizer": "fsmt",
    "FlaubertTokenizer": "flaubert",
    "FunnelTokenizer": "funnel",
    "GPT2Tokenizer": (
        "blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip instructblipvideo jais2 opt "
        "phi starcoder2"
    ),
    "GPTNeoXJapaneseTokenizer": "gpt_neox_japanese",
    "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "GPTSw3Tokenizer": "gpt-sw3",
    "GemmaTokenizer": (
        "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2 t5gemma zaya"
    ),
    "HerbertTokenizer": "herbert",
    "LEDTokenizer": "led",
    "LasrTokenizer": "lasr_ctc lasr_encoder",
    "LayoutLMv2Tokenizer": "layoutlmv2",
    "LayoutLMv3Tokenizer": "layoutlmv3",
    "LayoutXLMTokenizer": "layoutxlm",
    "LlamaTokenizer": "idefics idefics2",
    "LukeTokenizer": "luke",
    "LxmertTokenizer": "lxmert",
    "M2M100Tokenizer": "m2m_100",
    "MBart50Tokenizer": "mbart50",
    "MBartTokenizer": "mbart",
    "MLukeTokenizer": "mluke",
    "MPNetTokenizer": "mpnet",
    "MarianTokenizer": "marian",
    "MarkupLMTokenizer": "markuplm",
    "MgpstrTokenizer": "mgp-str",
    "MobileBertTokenizer": "mobilebert",
    "MvpTokenizer": "mvp",
    "MyT5Tokenizer": "myt5",
    "NllbTokenizer": "nllb nllb-moe",
    "NougatTokenizer": "nougat pp_formulanet",
    "OpenAIGPTTokenizer": "openai-gpt",
    "PLBartTokenizer": "plbart",
    "ParakeetTokenizer": (
        "granite_speech5_ctc nemotron3_5_asr nemotron_asr_streaming omniasr_ctc parakeet_ctc parakeet_rnnt parakeet_tdt"
    ),
    "PegasusTokenizer": "pegasus",
    "PerceiverTokenizer": "perceiver",
    "PhobertTokenizer": "phobert",
    "ProphetNetTokenizer": "prophetnet",
    "Qwen2Tokenizer": (
        "audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl lighton_ocr "
        "moss_transcribe_diarize ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl "
        "qwen3 qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice"
    ),
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
    "RagTokenizer": "rag",
    "ReformerTokenizer": "reformer",
    "RemBertTokenizer": "rembert",
    "RoCBertTokenizer": "roc_bert",
    "RoFormerTokenizer": "roformer",
    "RobertaTokenizer": (
        "bart bridgetower clap data2vec-text ibert lilt longformer mega mra roberta roberta-prelayernorm"
    ),
    "SeamlessM4TTokenizer": "seamless_m4t seamless_m4t_v2",
    "Siglip2Tokenizer": "siglip2",
    "SiglipTokenizer": "siglip",
    "Speech2TextTokenizer": "speech_to_text",
    "SpeechT5Tokenizer": "speecht5",
    "SplinterTokenizer": "splinter",
    "T5Tokenizer": "mt5 musicgen musicgen_melody switch_transformers t5",
    "TapasTokenizer": "tapas",
    "Tipsv2Tokenizer": "tipsv2",
    "TokenizersBackend": (
        "arctic aria beam bigbird_pegasus camembertv2-base canary chatlm cohere_asr ernie4_5 ernie4_5_moe "
        "flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2 gpt_bigcode "
        "gradium_phonon_tts granite granitemoe granitemoehybrid granitemoeshared h2ovl_chat hyperclovax "
        "hyperclovax_vlm internlm2 internlm3 iquestcoder jamba kimi_k25 kimi_linear kosmos-2 llava llava_next "
        "mimo_v2_flash minicpm3 minicpm_ocr minicpmv minicpmv4_6 minicpmv4_7 minimax_m2 ministral ministral3 "
        "mistral mistral3 mistral_large4 mixtral modernbert modernbert-decoder molmo molmo2 nemo_speechlm nemotron "
        "nvfp4 nystromformer olmo2 olmo3 olmo_hybrid omniasr opencua openvla paddleocr_vl pegasus_x persimmon phi3 "
        "phi3_v phimoe pix2struct pixtral pocket_tts smolvlm stablelm step3_vl umt5 vipllava voxtral "
        "voxtral_realtime xlm-roberta-xl"
    ),
    "UdopTokenizer": "udop",
    "VideoPrismTokenizer": "videoprism",
    "VitsTokenizer": "vits",
    "Wav2Vec2CTCTokenizer": ("data2vec-audio hubert unispeech unispeech-sat wav2vec2 wav2vec2-bert wav2vec2-conformer"),
    "Wav2Vec2PhonemeCTCTokenizer": "wav2vec2_phoneme",
    "WhisperTokenizer": "whisper",
    "XGLMTokenizer": "xglm",
    "XLMRobertaTokenizer": "gte jina_embeddings_v3 metaclip_2 trocr xlm-roberta xmod",
    "XLMTokenizer": "xlm",
    "XLNetTokenizer": "xlnet",
}
CLASS_OF_MODEL = {model: name for name, models in _CLASSES.items() for model in models.split()}
"""`model_type` of config.json -> class of its tokenizers."""
_WRONG = """
arctic camembertv2-base chatlm cohere_asr ernie4_5 ernie4_5_moe fuyu h2ovl_chat hyperclovax
hyperclovax_vision_v2 hyperclovax_vlm internlm2 internlm3 iquestcoder jamba llava llava_next minicpm3
minicpmv minimax_m2 modernbert modernbert-decoder molmo molmo2 nemotron nvfp4 opencua openvla paddleocr_vl
phi3 phi3_v phimoe qwen2 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen4_exp siglip2 smolvlm step3_vl vipllava
"""
WRONG_CLASS = frozenset(_WRONG.split())
"""Models whose published tokenizer_config.json names a class that transformers does not use."""
_NAMES = """
AlbertTokenizer BartTokenizer BarthezTokenizer BartphoTokenizer BasicTokenizer BertGenerationTokenizer
BertJapaneseTokenizer BertTokenizer BertweetTokenizer BigBirdTokenizer BioGptTokenizer
BlenderbotSmallTokenizer BlenderbotTokenizer ByT5Tokenizer CLIPTokenizer CTRLTokenizer CamembertTokenizer
CanineTokenizer CharacterTokenizer ClvpTokenizer CodeGenTokenizer CodeLlamaTokenizer CohereTokenizer
ConvBertTokenizer CpmAntTokenizer CpmTokenizer DPRContextEncoderTokenizer DPRQuestionEncoderTokenizer
DPRReaderTokenizer DebertaTokenizer DebertaV2Tokenizer DiaTokenizer DistilBertTokenizer EsmTokenizer
EsmcTokenizer FNetTokenizer FSMTTokenizer FastSpeech2ConformerTokenizer FlaubertTokenizer FunnelTokenizer
GPT2Tokenizer GPTNeoXJapaneseTokenizer GPTNeoXTokenizer GPTSw3Tokenizer GemmaTokenizer HerbertTokenizer
LEDTokenizer LasrTokenizer LayoutLMv2Tokenizer LayoutLMv3Tokenizer LayoutXLMTokenizer LlamaTokenizer
LukeTokenizer LxmertTokenizer M2M100Tokenizer MBart50Tokenizer MBartTokenizer MLukeTokenizer
MPNetTokenizer MarianTokenizer MarkupLMTokenizer MecabTokenizer MgpstrTokenizer MobileBertTokenizer
MvpTokenizer MyT5Tokenizer NllbTokenizer NougatTokenizer OpenAIGPTTokenizer PLBartTokenizer
ParakeetTokenizer PegasusTokenizer PerceiverTokenizer PhobertTokenizer Pop2PianoTokenizer
ProphetNetTokenizer Qwen2Tokenizer Qwen3_5Tokenizer RagTokenizer ReformerTokenizer RemBertTokenizer
RoCBertTokenizer RoFormerTokenizer RobertaTokenizer SeamlessM4TTokenizer Siglip2Tokenizer SiglipTokenizer
Speech2TextTokenizer SpeechT5Tokenizer SplinterTokenizer SqueezeBertTokenizer T5Tokenizer TapasTokenizer
Tipsv2Tokenizer UdopTokenizer VideoPrismTokenizer VitsTokenizer Wav2Vec2CTCTokenizer
Wav2Vec2PhonemeCTCTokenizer WhisperTokenizer WordpieceTokenizer XGLMTokenizer XLMRobertaTokenizer
XLMTokenizer XLNetTokenizer
"""
CLASSES = frozenset(_NAMES.split())
"""All classes in these tables, without `Fast`; any other name means the generic one."""


GENERIC = "TokenizersBackend"
_NOT_SPECIFIC = frozenset({GENERIC, "PythonBackend", "PreTrainedTokenizer", "PreTrainedTokenizerFast"})
_AS_THE_FILE_SAYS = frozenset({GENERIC, "BloomTokenizer", "ConvBertTokenizer", "FNetTokenizer", "ParakeetTokenizer"})
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

Vocabulary = dict[str, int]
Merges = list[tuple[str, str]]


class NotReadError(Exception):
    """transformers does not read the folder, or by unknown code; says why."""


@dataclass(frozen=True)
class BuiltClass:
    """A class of transformers that builds the parts of a tokenizer itself."""

    build: Callable[[Vocabulary, Merges, Mapping[str, Any]], Any]
    """Makes a `tokenizers.Tokenizer` of vocabulary, merges and settings."""
    named: Mapping[str, str | None]
    """Special tokens by role, if the settings name none."""
    adds_named: str | None = None
    """How its code adds the named tokens again: as "special" ones, or ("posted") as the settings write them; None:
    not."""
    drops_post_processor: bool = False
    """Whether its code replaces tokenizer.json's post-processor by one that adds the settings' tokens."""
    reads_merges_file: bool = True
    """Whether vocab.json and merges.txt suffice without a tokenizer.json."""


def class_of(settings: Mapping[str, Any], config: Mapping[str, Any], is_byte_level: bool) -> str:
    """Returns the class that AutoTokenizer chooses, without `Fast`, or `GENERIC`.

    Raises:
        NotReadError: The class is code in the folder.
    """
    said, model = _text(settings.get("tokenizer_class")), _text(config.get("model_type"))
    named = said or _text(config.get("tokenizer_class"))
    registered = CLASS_OF_MODEL.get(model)
    is_wrong = model in WRONG_CLASS or config.get("model_name") in WRONG_CLASS
    has_code = _has_code(settings)
    if not has_code and named == "LlamaTokenizer" and not is_wrong and is_byte_level:
        return GENERIC
    if not has_code and named and registered is not None and registered != named:
        if registered not in _NOT_SPECIFIC:
            chosen = registered if is_wrong else named
            if chosen in CLASSES and chosen not in _NOT_SPECIFIC:
                return chosen
        return GENERIC
    if has_code and model not in WRONG_CLASS and registered is None and said not in CLASSES | _NOT_SPECIFIC:
        raise NotReadError("its tokenizer_config.json names code of its own (auto_map), which is not run")
    chosen = named or registered or GENERIC
    return chosen if chosen in CLASSES else GENERIC


def built_class(name: str) -> BuiltClass | None:
    """Returns the class that builds its parts itself; None if it takes tokenizer.json as it is.

    Raises:
        NotReadError: The class is unknown.
    """
    if name in _AS_THE_FILE_SAYS:
        return None
    if name not in _BUILT:
        raise NotReadError(f"transformers reads it by its class {name}, which is not known here")
    return _BUILT[name]


def _has_code(settings: Mapping[str, Any]) -> bool:
    code = settings.get("auto_map")
    return bool(code.get("AutoTokenizer")) if isinstance(code, dict) else bool(code)


def _text(value: object) -> str:
    return value.removesuffix("Fast") if isinstance(value, str) else ""


def _byte_level(vocabulary: Vocabulary, merges: Merges, pieces: Any, normalizer: Any) -> Any:
    from tokenizers import Tokenizer, decoders, models

    parts = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, dropout=None, **parts))
    tokenizer.pre_tokenizer, tokenizer.decoder = pieces, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def _gpt2(vocabulary: Vocabulary, merges: Merges, settings: Mapping[str, Any]) -> Any:
    from tokenizers import pre_tokenizers

    space = settings.get("add_prefix_space", False)
    return _byte_level(vocabulary, merges, pre_tokenizers.ByteLevel(add_prefix_space=space), None)


def _gpt_neox(vocabulary: Vocabulary, merges: Merges, settings: Mapping[str, Any]) -> Any:
    from tokenizers import normalizers, pre_tokenizers

    options = {"add_prefix_space": settings.get("add_prefix_space", False)}
    return _byte_level(vocabulary, merges, pre_tokenizers.ByteLevel(**options), normalizers.NFC())


def _cohere(vocabulary: Vocabulary, merges: Merges, settings: Mapping[str, Any]) -> Any:
    from tokenizers import normalizers, pre_tokenizers

    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=settings.get("add_prefix_space", False), trim_offsets=True)
    pieces = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])
    return _byte_level(vocabulary, merges, pieces, normalizers.NFC())


def _qwen(pattern: str) -> Callable[[Vocabulary, Merges, Mapping[str, Any]], Any]:
    def build(vocabulary: Vocabulary, merges: Merges, settings: Mapping[str, Any]) -> Any:
        from tokenizers import Regex, normalizers, pre_tokenizers

        space = settings.get("add_prefix_space")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False if space is None else space, use_regex=False)
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        return _byte_level(vocabulary, merges, pre_tokenizers.Sequence([split, bytes_]), normalizers.NFC())

    return build


def _llama(vocabulary: Vocabulary, merges: Merges, settings: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    has_space = settings.get("add_prefix_space") is None or bool(settings["add_prefix_space"])
    scheme = ("always" if settings.get("legacy", False) else "first") if has_space else "never"
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True, dropout=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(content=" ", left=1)] if has_space else [])])
    return tokenizer


def _gemma(vocabulary: Vocabulary, merges: Merges, settings: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    unknown = str(settings.get("unk_token", "<unk>"))
    options = {"fuse_unk": True, "unk_token": unknown, "dropout": None, "byte_fallback": True}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


_END = "<|endoftext|>"
_OF_QWEN: dict[str, str | None] = {"unk_token": _END, "bos_token": None, "eos_token": _END, "pad_token": _END}
_OF_GPT: dict[str, str | None] = {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": None}
_OF_GEMMA = {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")}
_OF_COHERE = {"unk_token": "<UNK>", "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"} | {
    "pad_token": "<PAD>",
    "cls_token": "<CLS>",
    "sep_token": "<SEP>",
    "mask_token": "<MASK_TOKEN>",
}
_BUILT = {
    "GPT2Tokenizer": BuiltClass(_gpt2, _OF_GPT),
    "GPTNeoXTokenizer": BuiltClass(_gpt_neox, {**_OF_GPT, "pad_token": "<|padding|>"}, drops_post_processor=True),
    "CohereTokenizer": BuiltClass(_cohere, _OF_COHERE, adds_named="posted"),
    "Qwen2Tokenizer": BuiltClass(_qwen(_QWEN2), _OF_QWEN, adds_named="special"),
    "Qwen3_5Tokenizer": BuiltClass(_qwen(_QWEN3_5), _OF_QWEN, reads_merges_file=False),
    "LlamaTokenizer": BuiltClass(
        _llama, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, reads_merges_file=False
    ),
    "GemmaTokenizer": BuiltClass(_gemma, _OF_GEMMA, reads_merges_file=False),
}
