// Exact search backwards, level by level, for benchmarks/proof.py, which says what it proves.
//
// A state is a level (the next first execution) and the set of storages that are needed there. A
// step takes back what ran last: the level's first execution, which leads to the level below, or a
// re-execution of anything made before, which stays on it. Each level is searched to its end in the
// order of cost (Dijkstra 1959) before the one below; where a state, its time and the proven bound
// on the rest exceed the limit it is dropped.
//
// Of schedules that take the same time only one has to be found. The cost of a schedule is, in
// lexicographic order, its time, the weights of what is needed right after first executions, and
// the weights of what is needed after all steps. So these are dropped too, without the cheapest
// schedule being lost:
// - a state of which another needs one storage less at no more cost;
// - of two re-executions in both orders, the order with the heavier set between them;
// - a first execution after re-executions that all might run before it instead, if what is needed
//   at its new place is lighter.
// Of two ways to a state at equal cost neither is remembered: nothing is dropped for how it began.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#ifndef WORDS
#define WORDS 1
#endif

namespace {

using Number = int64_t;
using Word = uint64_t;

constexpr Number NEVER = INT64_MAX;

struct Set {
  std::array<Word, WORDS> words{};

  bool operator==(const Set& other) const { return words == other.words; }
  void toggle(int k) { words[k >> 6] ^= Word{1} << (k & 63); }
  bool any() const {
    Word all = 0;
    for (Word word : words) all |= word;
    return all;
  }
  template <class Visit> void each(Visit visit) const {
    for (int w = 0; w < WORDS; w++)
      for (Word rest = words[w]; rest; rest &= rest - 1) visit(w * 64 + __builtin_ctzll(rest));
  }
  Word hash() const {
    Word hash = 0x9E3779B97F4A7C15;
    for (Word word : words) {
      hash = (hash ^ word) * 0xFF51AFD7ED558CCD;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

Set operator&(Set a, const Set& b) {
  for (int w = 0; w < WORDS; w++) a.words[w] &= b.words[w];
  return a;
}
Set operator|(Set a, const Set& b) {
  for (int w = 0; w < WORDS; w++) a.words[w] |= b.words[w];
  return a;
}
Set without(Set a, const Set& b) {
  for (int w = 0; w < WORDS; w++) a.words[w] &= ~b.words[w];
  return a;
}

// The i-th of those laid out one after the other.
Set laid(const Word* words, int i = 0) {
  Set set;
  std::memcpy(set.words.data(), words + size_t(i) * WORDS, sizeof(Word) * WORDS);
  return set;
}

// Of one schedule's part from a state on: time of re-executions, then the weights.
struct Cost {
  Number time, firsts, steps;
  auto tied() const { return std::tie(time, firsts, steps); }
  bool operator<(const Cost& other) const { return tied() < other.tied(); }
  bool operator==(const Cost& other) const { return tied() == other.tied(); }
};

// A node, or the turn between the phases. part: what runs right before whenever this runs again,
// -1 nothing; makes: what a re-execution makes, which is needed no more before it.
struct Step {
  Number time, extra_bytes, state_bytes;
  int part;
  Set reads, writes, saved, gone, makes;
  std::vector<Set> takes;
};

// from, step: the state it was reached from, by which re-execution, -1 if that is not known or it
// is the first on its level. lightest: of the places for the first execution below at which the
// re-executions since might as well run before it.
struct State {
  Set needed;
  Cost cost;
  Number lightest;
  uint32_t from;
  int16_t step;
  bool is_followed;
};

class Level {
 public:
  std::vector<State> states;

  int find(const Set& needed) const { return table_.empty() ? -1 : int(table_[slot(needed)]) - 1; }

  void add(const State& state) {
    if (2 * states.size() >= table_.size()) grow();
    table_[slot(state.needed)] = uint32_t(states.size() + 1);
    states.push_back(state);
  }

  void clear() {
    states.clear();
    table_.clear();
  }

 private:
  std::vector<uint32_t> table_;  // hash table of positions in `states`, from 1 on

  size_t slot(const Set& needed) const {
    size_t at = needed.hash() & (table_.size() - 1);
    while (table_[at] && !(states[table_[at] - 1].needed == needed)) at = (at + 1) & (table_.size() - 1);
    return at;
  }

  void grow() {
    table_.assign(std::max<size_t>(256, 2 * table_.size()), 0);
    for (size_t i = 0; i < states.size(); i++) table_[slot(states[i].needed)] = uint32_t(i + 1);
  }
};

}  // namespace

// As benchmarks/proof.py lays it out: `Set`s are WORDS words each; `first_take` says which of
// `takes` belong to a step.
struct Layout {
  Number steps, storages, turn, budget_bytes, room_bytes;
  const Number *sizes, *maker, *times, *extra_bytes, *state_bytes, *part, *first_take;
  const Word *held, *reads, *writes, *saved, *gone, *takes;
};

namespace {

// What a re-execution takes back. last: of its parts the one that runs first, whose operands are
// `before`; after: what is needed after that part.
struct Undone {
  Set before, after;
  Number bytes, time;
  int last;
};

class Problem {
 public:
  int storages, turn;
  std::vector<int> maker;
  std::vector<Step> steps;
  Set held;

  explicit Problem(const Layout& given)
      : storages(int(given.storages)),
        turn(int(given.turn)),
        maker(given.maker, given.maker + given.storages),
        held(laid(given.held)),
        budget_bytes_(given.budget_bytes),
        room_bytes_(given.room_bytes),
        sizes_(given.sizes, given.sizes + given.storages) {
    for (int i = 0; i < int(given.steps); i++) {
      Step step{given.times[i],       given.extra_bytes[i], given.state_bytes[i],
                int(given.part[i]),   laid(given.reads, i), laid(given.writes, i),
                laid(given.saved, i), laid(given.gone, i),  {}, {}};
      step.makes = without(step.writes, held);
      for (Number k = given.first_take[i]; k < given.first_take[i + 1]; k++)
        step.takes.push_back(laid(given.takes, int(k)));
      steps.push_back(step);
    }
    // Nothing is proven yet of any level.
    alone_.assign(steps.size() + 1, 0);
    with_one_.assign((steps.size() + 1) * size_t(storages), 0);
  }

  Number bytes(const Set& set) const {
    Number sum = 0;
    set.each([&](int k) { sum += sizes_[k]; });
    return sum;
  }

  // Larger sets are heavier; of equal bytes what is made later.
  Number weight(const Set& set) const {
    Number sum = 0;
    set.each([&](int k) { sum += (sizes_[k] << 10) + maker[k] + 2; });
    return sum;
  }

  // Do the needed storages before a step and what it makes fit? In the storage of an operand that
  // is needed no more, if need be, unless it makes another copy of something.
  bool fits(int i, const Set& before, Number before_bytes, const Set& after, Number more) const {
    const Step& step = steps[i];
    Number over = before_bytes + step.extra_bytes + more - budget_bytes_;
    if (over <= 0) return true;
    if ((before & step.writes).any()) return false;
    Set free = without(before, after);
    for (const Set& taken : step.takes)
      if ((taken & free) == taken && bytes(taken) >= over) return true;
    return false;
  }

  bool fits_again(const Undone& undone, int level) const {
    return fits(undone.last, undone.before, undone.bytes, undone.after, more_bytes(undone.last, level));
  }

  Number more_bytes(int i, int level) const {
    return steps[i].state_bytes + (level == turn ? room_bytes_ : 0);
  }

  Undone undo(int i, const Set& needed, Number needed_bytes) const {
    Undone undone{needed, needed, needed_bytes, 0, i};
    for (int part = i; part >= 0; part = steps[part].part) {
      const Step& step = steps[part];
      undone.last = part;
      undone.after = undone.before;
      undone.time += step.time;
      Set stays = without(undone.after, step.makes);
      undone.before = stays | step.reads | step.saved;
      undone.bytes += bytes(without(undone.before, stays)) - bytes(without(undone.after, stays));
    }
    return undone;
  }

  // Of the time of re-executions before a level at which a set is needed.
  Number bound(int level, const Set& needed) const {
    Number best = alone_[level];
    const Number* with_one = &with_one_[size_t(level) * storages];
    needed.each([&](int k) { best = std::max(best, with_one[k]); });
    return best;
  }

  void learn(int level, int storage, Number bound) {
    Number& known = storage < 0 ? alone_[level] : with_one_[size_t(level) * storages + storage];
    known = std::max(known, bound);
  }

 private:
  Number budget_bytes_, room_bytes_;
  std::vector<Number> sizes_, alone_, with_one_;
};

class Search {
 public:
  Search(const Problem& problem, Number limit, Number most, Number width)
      : problem_(problem), limit_(limit), most_(most), width_(width) {}

  // Least time of re-executions before `level` at which `needed` is needed; -1: more than the
  // limit; -2: a level had too many states.
  Number run(int level, const Set& needed) {
    if (problem_.bound(level, needed) > limit_) return -1;
    here_.add(State{needed, {0, 0, 0}, NEVER, 0, -1, false});
    for (; level > 0; level--) {
      if (!follow(level)) return -2;
      if (width_ && Number(below_.states.size()) > width_) narrow(level - 1);
      here_ = std::move(below_);
      below_.clear();
      if (here_.states.empty()) return -1;
    }
    return std::min_element(here_.states.begin(), here_.states.end(), [](auto& a, auto& b) {
             return a.cost < b.cost;
           })->cost.time;
  }

 private:
  struct Queued {
    Cost cost;
    uint32_t state;
    bool operator<(const Queued& other) const {
      return other.cost < cost || (other.cost == cost && other.state < state);
    }
  };

  const Problem& problem_;
  Number limit_, most_, width_;
  Level here_, below_;
  std::priority_queue<Queued> queue_;

  bool is_beyond(int level, const Set& needed, Number time) const {
    return time + problem_.bound(level, needed) > limit_;
  }

  bool follow(int level) {
    queue_ = {};
    for (size_t i = 0; i < here_.states.size(); i++) queue_.push({here_.states[i].cost, uint32_t(i)});
    while (!queue_.empty()) {
      Queued next = queue_.top();
      queue_.pop();
      State& known = here_.states[next.state];
      if (known.is_followed || !(known.cost == next.cost)) continue;
      State state = known;
      if (is_dominated(state) || is_beyond(level, state.needed, state.cost.time)) continue;
      known.is_followed = true;
      bool may_leave = leave(level, state);
      again(level, state, next.state, may_leave);
      if (Number(here_.states.size()) > most_) return false;
    }
    return true;
  }

  bool is_dominated(const State& state) const {
    bool found = false;
    without(state.needed, problem_.held).each([&](int k) {
      if (found) return;
      Set less = state.needed;
      less.toggle(k);
      int i = here_.find(less);
      found = i >= 0 && here_.states[i].is_followed && !(state.cost < here_.states[i].cost);
    });
    return found;
  }

  // Takes back the first execution; says whether it fits.
  bool leave(int level, const State& state) {
    const Step& first = problem_.steps[level - 1];
    Set saved = first.saved & state.needed;
    Set makes = first.writes | saved;
    if (without(state.needed & first.gone, makes).any()) return false;
    Set before = without(state.needed, makes) | first.reads;
    if (!problem_.fits(level - 1, before, problem_.bytes(before), state.needed, problem_.bytes(saved)))
      return false;
    Number weight = problem_.weight(state.needed);
    if (weight <= state.lightest && !is_beyond(level - 1, before, state.cost.time)) {
      Cost cost{state.cost.time, state.cost.firsts + weight, state.cost.steps + weight};
      reach(below_, State{before, cost, NEVER, 0, -1, false});
    }
    return true;
  }

  void again(int level, const State& state, uint32_t from, bool may_leave) {
    Number bytes = problem_.bytes(state.needed), weight = problem_.weight(state.needed);
    std::vector<int> tried;
    without(state.needed, problem_.held).each([&](int k) {
      int i = problem_.maker[k];
      if (i < 0 || i >= level || std::find(tried.begin(), tried.end(), i) != tried.end()) return;
      tried.push_back(i);
      Undone undone = problem_.undo(i, state.needed, bytes);
      Cost cost{state.cost.time + undone.time, state.cost.firsts, state.cost.steps + weight};
      if (cost.time > limit_ || !problem_.fits_again(undone, level)) return;
      int known = here_.find(undone.before);
      if (known >= 0 && here_.states[known].cost < cost) return;
      if (is_better_before(level, state, weight, i, undone.before)) return;
      if (known < 0 && is_beyond(level, undone.before, cost.time)) return;
      Number lightest = NEVER;
      if (may_run_below(level, i, undone))
        lightest = may_leave ? std::min(state.lightest, weight) : state.lightest;
      reach(here_, State{undone.before, cost, lightest, from, int16_t(i), false}, true);
    });
  }

  void reach(Level& level, const State& state, bool is_queued = false) {
    int known = level.find(state.needed);
    if (known < 0) {
      level.add(state);
      known = int(level.states.size()) - 1;
    } else {
      State& other = level.states[known];
      if (other.cost < state.cost) return;
      if (other.cost == state.cost) {
        other.lightest = std::max(other.lightest, state.lightest);
        other.step = -1;
        other.is_followed = false;
      } else {
        other = state;
      }
    }
    if (is_queued) queue_.push({state.cost, uint32_t(known)});
  }

  // Is there a lighter set between step i and the one after it if they change places?
  bool is_better_before(int level, const State& state, Number weight, int i, const Set& before) const {
    if (state.step < 0) return false;
    const Set& start = here_.states[state.from].needed;
    if (!(start & problem_.steps[i].makes).any()) return false;
    Undone one = problem_.undo(i, start, problem_.bytes(start));
    if (!(one.before & problem_.steps[state.step].makes).any()) return false;
    if (problem_.weight(one.before) >= weight || !problem_.fits_again(one, level)) return false;
    Undone both = problem_.undo(state.step, one.before, one.bytes);
    return !without(both.before, before).any() && problem_.fits_again(both, level);
  }

  // Might step i as well run before the first execution below?
  bool may_run_below(int level, int i, const Undone& undone) const {
    if (level - 1 == problem_.turn || i >= level - 1) return false;
    const Step& first = problem_.steps[level - 1];
    Set before = without(undone.before, first.writes) | first.reads;
    Set after = without(undone.after, first.writes) | first.reads;
    Number more = problem_.more_bytes(undone.last, level - 1);
    return problem_.fits(undone.last, before, problem_.bytes(before), after, more);
  }

  // Keeps the states below that promise most.
  void narrow(int level) {
    std::vector<std::pair<Number, uint32_t>> order;
    for (size_t i = 0; i < below_.states.size(); i++) {
      const State& state = below_.states[i];
      order.push_back({state.cost.time + problem_.bound(level, state.needed), uint32_t(i)});
    }
    std::nth_element(order.begin(), order.begin() + width_, order.end());
    Level kept;
    for (Number i = 0; i < width_; i++) kept.add(below_.states[order[i].second]);
    below_ = std::move(kept);
  }
};

}  // namespace

extern "C" {

Problem* proof_make(const Layout* given) { return new Problem(*given); }

void proof_free(Problem* problem) { delete problem; }

void proof_learn(Problem* problem, int level, int storage, Number bound) {
  problem->learn(level, storage, bound);
}

Number proof_bound(const Problem* problem, int level, const Word* needed) {
  return problem->bound(level, laid(needed));
}

Number proof_search(const Problem* problem, int level, const Word* needed, Number limit, Number most,
                    Number width) {
  return Search(*problem, limit, most, width).run(level, laid(needed));
}
}
