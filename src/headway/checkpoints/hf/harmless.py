"""Keys of config.json that have no effect on what is loaded here, in any family."""


def words(text: str) -> tuple[str, ...]:
    """Returns the words of a text. A word that ends with a dot is a prefix of the next: "a m. b c" is a, m.b, m.c."""
    names: list[str] = []
    place = ""
    for word in text.split():
        if word.endswith("."):
            place = word
        else:
            names.append(f"{place}{word}")
    return tuple(names)


HARMLESS = (
    # how the folder was made and how it is run
    *words(
        "transformers_version _name_or_path _attn_implementation _attn_implementation_autoset attn_implementation "
        "dtype torch_dtype use_cache pretraining_tp torchscript use_bfloat16 tf_legacy_loss return_dict "
        "return_dict_in_generate output_attentions output_hidden_states output_scores chunk_size_feed_forward "
        "max_sequence_length transformers.js_config unsloth_version unsloth_fixed"
    ),
    # token ids: those of the tokenizer and the generation config are used
    *words(
        "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id "
        "forced_eos_token_id begin_suppress_tokens suppress_tokens bad_words_ids exponential_decay_length_penalty "
        "tokenizer_class prefix"
    ),
    # generation settings that old versions stored here
    *words(
        "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
        "top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
        "num_return_sequences remove_invalid_values"
    ),
    # heads of other tasks
    *words("id2label label2id problem_type task_specific_params finetuning_task num_labels"),
    # lengths to which an embedder's vectors may be truncated
    *words("matryoshka_dimensions"),
)
