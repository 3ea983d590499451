#include "tokenizer.h"

#include <sentencepiece_processor.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "utf8.h"

/* The library's switch for its own log lines on stderr; no installed header declares it. */
namespace sentencepiece::logging {
void SetMinLogLevel(int level);
}

namespace {

constexpr int LOG_FATAL_ONLY = 3;
constexpr size_t MAX_MODEL_BYTES = size_t{64} << 20;  // the library takes about twenty times as much memory
constexpr size_t MAX_TEXT_BYTES = INT_MAX / 3 - 1;    // it counts in int, and ' ' becomes three bytes

constexpr std::string_view SPACE_SYMBOL = "\u2581";
constexpr std::string_view REPLACEMENT = "\uFFFD";

/* What decoding one id can bring before the id's own text: a replacement for each byte that was held. */
constexpr size_t MAX_FLUSH_BYTES = (sizeof(DecodeState::held) - 1) * REPLACEMENT.size();
constexpr size_t MAX_PIECE_BYTES = TOKENIZER_MAX_PIECE - MAX_FLUSH_BYTES;

/* The library matches user-defined pieces into an array of 64 and reads past its end if more of them begin
 * at one place. These are prefixes of each other, so none of them may have more than 64 characters. */
constexpr size_t MAX_USER_DEFINED_CHARACTERS = 64;

enum class Kind { text, byte, control };

struct Piece {
    Kind kind;
    bool space_first;  // begins with the space symbol, so that its first space may be dropped
    std::string text;  // what it prints; of kind byte: the byte; of kind control: empty
};

/* Which of the spaces at the start of a text the library drops. */
enum class LeadingSpace { kept, one_dropped, one_dropped_per_piece };

}  // namespace

struct Tokenizer {
    sentencepiece::SentencePieceProcessor library;  // encodes
    std::vector<Piece> pieces;                      // by id; decode, without the library
    LeadingSpace leading_space;
    int bos_id, eos_id, unk_id;
};

namespace {

/* ---- The boundary: inside, failures are exceptions; outside, false and a line. ---- */

void error_line(char *error, size_t error_bytes, const char *subject, const char *reason) {
    std::snprintf(error, error_bytes, "%s: %s", subject, reason);
    for (char *c = error; *c; c++) {  // a reason may quote a hostile piece
        const unsigned char byte = static_cast<unsigned char>(*c);
        if (byte < ' ' || byte == 0x7f) {
            *c = '?';
        }
    }
}

/* Protobuf's containers are broken once an allocation within them has thrown, and crash when they are destroyed. So
 * there is no way back from memory that is short while the library works. */
class NoWayBack {
   public:
    NoWayBack() : before_(std::set_new_handler(end)) {}
    ~NoWayBack() { std::set_new_handler(before_); }

    [[noreturn]] static void end() {
        std::fputs("out of memory: in the tokenizer\n", stderr);
        std::exit(1);
    }

   private:
    std::new_handler before_;
};

template <typename Action>
bool guarded(const Action &action, const char *subject, char *error, size_t error_bytes) {
    const NoWayBack without_memory;
    try {
        action();
        return true;
    } catch (const std::exception &e) {
        error_line(error, error_bytes, subject, e.what());
    } catch (...) {
        error_line(error, error_bytes, subject, "sentencepiece failed");
    }
    return false;
}

void require(const sentencepiece::util::Status &status) {
    if (!status.ok()) {
        throw std::runtime_error(std::string("sentencepiece says: ") + status.error_message());
    }
}

/* ---- The model file, a protobuf message. ----
 *
 * The library trusts some of its contents so far that it reads out of bounds or ends the process. So this
 * reads the message first, and the library sees only what passes. It also learns here what the library's
 * interface does not tell. Whatever protobuf would skip or merge in a surprising way is refused. */

enum WireType : uint32_t { WIRE_VARINT = 0, WIRE_64_BITS = 1, WIRE_BYTES = 2, WIRE_32_BITS = 5 };

/* A field's number and wire type in one number, as they stand in the file. */
constexpr uint32_t field_tag(uint32_t number, WireType type) {
    return number << 3 | type;
}

constexpr uint32_t MODEL_PIECE = field_tag(1, WIRE_BYTES);
constexpr uint32_t MODEL_TRAINER = field_tag(2, WIRE_BYTES);
constexpr uint32_t MODEL_NORMALIZER = field_tag(3, WIRE_BYTES);
constexpr uint32_t MODEL_DENORMALIZER = field_tag(5, WIRE_BYTES);
constexpr uint32_t PIECE_TEXT = field_tag(1, WIRE_BYTES);
constexpr uint32_t PIECE_TYPE = field_tag(3, WIRE_VARINT);
constexpr uint32_t TRAINER_UNK_SURFACE = field_tag(44, WIRE_BYTES);
constexpr uint32_t NORMALIZER_CHARSMAP = field_tag(2, WIRE_BYTES);
constexpr uint32_t NORMALIZER_ADD_DUMMY_PREFIX = field_tag(3, WIRE_VARINT);
constexpr uint32_t NORMALIZER_REMOVE_EXTRA_WHITESPACES = field_tag(4, WIRE_VARINT);

constexpr uint64_t TYPE_USER_DEFINED = 4;

class Message {
   public:
    explicit Message(std::string_view message) : rest_(message) {}

    /* Go to the next field; false at the end. */
    bool next() {
        if (rest_.empty()) {
            return false;
        }
        const uint64_t number_and_type = take_varint();
        if (number_and_type > UINT32_MAX) {
            throw std::runtime_error("not a sentencepiece model (field number)");
        }
        tag = static_cast<uint32_t>(number_and_type);
        value = 0;
        bytes = {};
        switch (tag & 7) {
        case WIRE_VARINT:
            value = take_varint();
            break;
        case WIRE_64_BITS:
            bytes = take(8);
            break;
        case WIRE_BYTES:
            bytes = take(take_varint());
            break;
        case WIRE_32_BITS:
            bytes = take(4);
            break;
        default:
            throw std::runtime_error("not a sentencepiece model (wire type)");
        }
        return true;
    }

    uint32_t tag = 0;
    uint64_t value = 0;      // of a varint
    std::string_view bytes;  // of the other wire types

   private:
    std::string_view take(uint64_t n) {
        if (n > rest_.size()) {
            throw std::runtime_error("truncated, or not a sentencepiece model");
        }
        const std::string_view taken = rest_.substr(0, n);
        rest_.remove_prefix(n);
        return taken;
    }

    uint64_t take_varint() {
        uint64_t result = 0;
        for (int shift = 0; shift < 64; shift += 7) {
            const uint64_t byte = static_cast<unsigned char>(take(1)[0]);
            result |= (byte & 0x7f) << shift;
            if (byte < 0x80) {
                return result;
            }
        }
        throw std::runtime_error("not a sentencepiece model (number too long)");
    }

    std::string_view rest_;
};

struct Model {
    std::vector<std::string_view> pieces;  // by id, into the model's bytes
    std::string unk_surface = " \u2047 ";  // what the unknown id prints
    bool add_dummy_prefix = true;
    bool remove_extra_whitespaces = true;
};

/* Text that the library and tokenizer_decode can work with. */
void check_text(std::string_view text, const std::string &name) {
    if (text.size() > MAX_PIECE_BYTES) {
        throw std::runtime_error(name + " has " + std::to_string(text.size()) + " bytes, more than " +
                                 std::to_string(MAX_PIECE_BYTES));
    }
    if (text.find('\0') != std::string_view::npos || utf8_check(text.data(), text.size()) != text.size()) {
        throw std::runtime_error(name + " is not well-formed text");
    }
}

size_t count_characters(std::string_view text) {
    return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; });
}

std::string_view parse_piece(Message message, const std::string &name) {
    std::string_view text;
    bool user_defined = false;
    while (message.next()) {
        if (message.tag == PIECE_TEXT) {
            text = message.bytes;
        } else if (message.tag == PIECE_TYPE) {
            // Protobuf keeps 32 bits, and the last type that it knows: once user-defined is suspect enough.
            user_defined |= (message.value & UINT32_MAX) == TYPE_USER_DEFINED;
        }
    }
    if (text.empty()) {
        throw std::runtime_error(name + " is empty");
    }
    check_text(text, name);
    if (user_defined && count_characters(text) > MAX_USER_DEFINED_CHARACTERS) {
        throw std::runtime_error(name + " is user-defined and has more than " +
                                 std::to_string(MAX_USER_DEFINED_CHARACTERS) + " characters");
    }
    return text;
}

void parse_trainer(Message message, Model *model) {
    while (message.next()) {
        if (message.tag == TRAINER_UNK_SURFACE) {
            check_text(message.bytes, "the text of unknown tokens");
            model->unk_surface = message.bytes;
        }
    }
}

void parse_normalizer(Message message, Model *model) {
    while (message.next()) {
        if (message.tag == NORMALIZER_CHARSMAP && !message.bytes.empty()) {
            // The library follows its offsets unchecked; models of the Llama family have none.
            throw std::runtime_error("normalization rules are not supported");
        } else if (message.tag == NORMALIZER_ADD_DUMMY_PREFIX) {
            model->add_dummy_prefix = message.value != 0;
        } else if (message.tag == NORMALIZER_REMOVE_EXTRA_WHITESPACES) {
            model->remove_extra_whitespaces = message.value != 0;
        }
    }
}

Model parse_model(std::string_view bytes) {
    if (bytes.size() > MAX_MODEL_BYTES) {
        throw std::runtime_error("too large");
    }
    Model model;
    Model unused;  // a denormalizer is harmless without rules
    Message message(bytes);
    while (message.next()) {
        const Message inner(message.bytes);
        if (message.tag == MODEL_PIECE) {
            model.pieces.push_back(parse_piece(inner, "piece " + std::to_string(model.pieces.size())));
        } else if (message.tag == MODEL_TRAINER) {
            parse_trainer(inner, &model);
        } else if (message.tag == MODEL_NORMALIZER) {
            parse_normalizer(inner, &model);
        } else if (message.tag == MODEL_DENORMALIZER) {
            parse_normalizer(inner, &unused);
        }
    }
    if (model.pieces.empty()) {
        throw std::runtime_error("no pieces, or not a sentencepiece model");
    }
    return model;
}

/* ---- Loading ---- */

std::string with_spaces(std::string_view piece) {
    std::string text(piece);
    for (size_t at = text.find(SPACE_SYMBOL); at != std::string::npos; at = text.find(SPACE_SYMBOL, at)) {
        text.replace(at, SPACE_SYMBOL.size(), " ");
    }
    return text;
}

Piece make_piece(const sentencepiece::SentencePieceProcessor &library, int id, const Model &model) {
    const std::string_view piece = model.pieces[id];
    if (library.IsControl(id)) {
        return {Kind::control, false, ""};
    }
    if (library.IsUnknown(id)) {
        return {Kind::text, false, model.unk_surface};
    }
    if (library.IsByte(id)) {  // "<0x41>"; the library refuses any other form
        const int byte = std::stoi(std::string(piece.substr(3, 2)), nullptr, 16);
        return {Kind::byte, false, std::string(1, static_cast<char>(byte))};
    }
    return {Kind::text, piece.substr(0, SPACE_SYMBOL.size()) == SPACE_SYMBOL, with_spaces(piece)};
}

LeadingSpace leading_space_rule(const Model &model) {
    if (model.remove_extra_whitespaces) {
        return LeadingSpace::one_dropped_per_piece;
    }
    return model.add_dummy_prefix ? LeadingSpace::one_dropped : LeadingSpace::kept;
}

std::unique_ptr<Tokenizer> load(std::string_view bytes) {
    const Model model = parse_model(bytes);
    auto t = std::make_unique<Tokenizer>();
    sentencepiece::logging::SetMinLogLevel(LOG_FATAL_ONLY);
    require(t->library.LoadFromSerializedProto(bytes));
    if (static_cast<size_t>(t->library.GetPieceSize()) != model.pieces.size()) {
        throw std::runtime_error("sentencepiece sees another number of pieces");
    }
    const int n_pieces = static_cast<int>(model.pieces.size());
    t->pieces.reserve(model.pieces.size());
    for (int id = 0; id < n_pieces; id++) {
        // The library finds pieces by text, also when it decodes.
        if (t->library.PieceToId(model.pieces[id]) != id) {
            throw std::runtime_error("the text of piece " + std::to_string(id) + " is there twice");
        }
        t->pieces.push_back(make_piece(t->library, id, model));
    }
    t->leading_space = leading_space_rule(model);
    t->bos_id = t->library.bos_id();
    t->eos_id = t->library.eos_id();
    t->unk_id = t->library.unk_id();
    return t;
}

/* ---- Decoding ---- */

size_t append(char *out, std::string_view text) {
    std::memcpy(out, text.data(), text.size());
    return text.size();
}

/* Give out what is decided among the held bytes: whole characters, and a replacement for each other byte. */
size_t give_characters(DecodeState *state, char *out) {
    size_t n = 0;
    while (state->n_held > 0) {
        const int length = utf8_length(state->held, state->n_held);
        if (length < 0) {
            break;
        }
        const int used = std::max(length, 1);
        const std::string_view character(reinterpret_cast<const char *>(state->held), used);
        n += append(out + n, length > 0 ? character : REPLACEMENT);
        state->n_held -= used;
        std::memmove(state->held, state->held + used, state->n_held);
    }
    return n;
}

/* Give up the held bytes: no byte that continues them follows. */
size_t give_replacements(DecodeState *state, char *out) {
    size_t n = 0;
    for (; state->n_held > 0; state->n_held--) {
        n += append(out + n, REPLACEMENT);
    }
    return n;
}

size_t give_text(const Tokenizer *t, const Piece &piece, DecodeState *state, char *out) {
    std::string_view text = piece.text;
    const bool drop = !state->started && piece.space_first && t->leading_space != LeadingSpace::kept;
    if (drop) {
        text.remove_prefix(1);
    }
    if (!text.empty() || (drop && t->leading_space == LeadingSpace::one_dropped)) {
        state->started = true;
    }
    return append(out, text);
}

}  // namespace

bool tokenizer_load(Tokenizer **t, const void *model, size_t bytes, char *error, size_t error_bytes) {
    const auto action = [&] { *t = load({static_cast<const char *>(model), bytes}).release(); };
    return guarded(action, "tokenizer model", error, error_bytes);
}

void tokenizer_free(Tokenizer *t) {
    delete t;
}

int tokenizer_vocab_size(const Tokenizer *t) {
    return static_cast<int>(t->pieces.size());
}
int tokenizer_bos_id(const Tokenizer *t) {
    return t->bos_id;
}
int tokenizer_eos_id(const Tokenizer *t) {
    return t->eos_id;
}
int tokenizer_unk_id(const Tokenizer *t) {
    return t->unk_id;
}

bool tokenizer_encode(const Tokenizer *t, const char *text, size_t bytes, int **ids, size_t *n, char *error,
                      size_t error_bytes) {
    const auto action = [&] {
        if (bytes > MAX_TEXT_BYTES) {
            throw std::runtime_error("too long to encode");
        }
        std::vector<int> result;
        require(t->library.Encode(std::string_view(text, bytes), &result));
        int *copy = nullptr;
        if (!result.empty()) {
            copy = static_cast<int *>(std::malloc(result.size() * sizeof *copy));
            if (!copy) {
                NoWayBack::end();
            }
            std::copy(result.begin(), result.end(), copy);
        }
        *ids = copy;
        *n = result.size();
    };
    return guarded(action, "text", error, error_bytes);
}

size_t tokenizer_decode(const Tokenizer *t, DecodeState *state, int id, char *out) {
    if (id < 0 || id >= tokenizer_vocab_size(t)) {
        return 0;
    }
    const Piece &piece = t->pieces[id];
    if (piece.kind == Kind::byte) {
        state->started = true;
        state->held[state->n_held++] = static_cast<unsigned char>(piece.text[0]);
        return give_characters(state, out);
    }
    const size_t n = give_replacements(state, out);
    if (piece.kind == Kind::control) {
        state->started = state->started && id != t->bos_id;
        return n;
    }
    return n + give_text(t, piece, state, out + n);
}

size_t tokenizer_decode_end(DecodeState *state, char *out) {
    const size_t n = state->n_held > 0 ? append(out, REPLACEMENT) : 0;
    *state = DecodeState{};
    return n;
}
