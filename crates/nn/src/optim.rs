//! Optimisers. A step replaces each parameter that has a gradient by a new leaf, all of them or none ([`Step`]); state is
//! kept by path. A parameter that stands in several places of a model is updated once and stays one.

use crate::Module;
use kiln_tensor::{DType, Device, Gradients, NonFinite, Step, Tensor, no_grad};
use std::collections::{BTreeMap, HashMap};

/// Something that improves a model by its gradients.
pub trait Optimizer {
    /// The parameter at `path` after a step along `gradient`. Whatever is kept for it besides goes through
    /// [`Step::commit`], so that a step that is refused leaves it as it was; the parameter itself does so afterwards.
    fn update(&mut self, path: &str, parameter: &Tensor, gradient: &Tensor, step: &Step) -> Tensor;

    /// Called once before the parameters of a step are updated.
    fn begin(&mut self, _step: &Step) {}

    /// What becomes of steps whose gradients are not finite.
    fn nonfinite(&self) -> NonFinite {
        NonFinite::Continue
    }

    /// What it has learnt so far besides the parameters, by name: enough to go on from.
    fn state(&self) -> Vec<(String, Tensor)>;

    /// Goes on from what [`Optimizer::state`] gave after `steps` steps.
    fn restore(&mut self, steps: u64, state: Vec<(String, Tensor)>);

    /// Updates every parameter of `model` that has a gradient, and ends the step for its device. If one of the gradients
    /// could not be computed, the model and what the optimiser keeps stay as they are: see [`NonFinite`], also for gradients
    /// that are infinite or NaN.
    ///
    /// # Panics
    /// If there are gradients and none of them belongs to `model`: its parameters are new after each step, so gradients
    /// are taken from the model as it is now.
    #[track_caller]
    fn step(&mut self, model: &mut dyn Module, gradients: &Gradients) {
        step(self, model, gradients);
    }

    /// Like [`Optimizer::step`], with the gradients of all parameters in the model's order.
    ///
    /// # Panics
    /// If there are more or fewer than the model has parameters.
    #[track_caller]
    fn step_with(&mut self, model: &mut dyn Module, gradients: &[Tensor]) {
        let mut places = 0;
        model.visit("", &mut |_, _| places += 1);
        if places != gradients.len() {
            panic!("step_with: {} gradients for {places} parameters", gradients.len());
        }
        step_by(self, model, &[], &mut |i, _| gradients.get(i).cloned());
    }

    /// Updates every parameter for which `gradient` gives one; it is asked with the parameter's place in the model.
    #[track_caller]
    fn step_by(
        &mut self,
        model: &mut dyn Module,
        gradient: &mut dyn FnMut(usize, &Tensor) -> Option<Tensor>,
    ) {
        step_by(self, model, &[], gradient);
    }
}

/// [`Optimizer::step`], told as the caller's also where the optimiser's type is not known.
#[track_caller]
pub fn step<O: Optimizer + ?Sized>(optimizer: &mut O, model: &mut dyn Module, gradients: &Gradients) {
    let mut found = false;
    model.visit("", &mut |_, parameter| found |= gradients.get(parameter).is_some());
    if !found && !gradients.is_empty() {
        panic!(
            "step: none of the {} gradients belongs to a parameter of the model: parameters are new after each step, so \
             gradients are taken from the model as it is now",
            gradients.len()
        );
    }
    step_by(optimizer, model, gradients.words(), &mut |_, parameter| gradients.get(parameter).cloned());
}

/// One step: what it takes is known before anything changes.
#[track_caller]
fn step_by<O: Optimizer + ?Sized>(
    optimizer: &mut O,
    model: &mut dyn Module,
    words: &[Tensor],
    gradient: &mut dyn FnMut(usize, &Tensor) -> Option<Tensor>,
) {
    let (mut due, mut firsts) = (BTreeMap::new(), HashMap::new());
    let mut places = 0;
    model.visit("", &mut |path, parameter| {
        let place = places;
        places += 1;
        // A parameter that stands in several places goes by the first.
        if let Some(leaf) = parameter.leaf()
            && *firsts.entry(leaf).or_insert(place) != place
        {
            return;
        }
        if let Some(gradient) = gradient(place, parameter) {
            due.insert(place, (path.to_string(), gradient));
        }
    });
    if due.is_empty() {
        return;
    }
    let guarded = due.values().cloned().collect();
    let guard = Step::new(guarded, words, optimizer.nonfinite());
    let (mut place, mut made) = (0, HashMap::new());
    no_grad(|| {
        optimizer.begin(&guard);
        model.visit_mut("", &mut |path, parameter| {
            let (at, leaf) = (place, parameter.leaf());
            place += 1;
            if let Some(new) = leaf.and_then(|leaf| made.get(&leaf)) {
                *parameter = Tensor::clone(new);
                return;
            }
            let Some((_, gradient)) = due.remove(&at) else { return };
            let old = parameter.detach();
            let new = optimizer.update(path, &old, &gradient, &guard);
            *parameter = guard.commit(new, &old).requires_grad();
            if let Some(leaf) = leaf.filter(|leaf| firsts.contains_key(leaf)) {
                made.insert(leaf, parameter.clone());
            }
        });
    });
    no_grad(|| model.visit_buffers("", &mut |_, buffer| buffer.commit(&guard)));
    guard.devices().for_each(Device::mark);
}

/// Stochastic gradient descent, with momentum and weight decay.
pub struct Sgd {
    /// Learning rate.
    pub lr: f64,
    /// How much of the last velocity stays; 0 for none.
    pub momentum: f64,
    /// Added to the gradient: this times the parameter.
    pub weight_decay: f64,
    /// What becomes of steps whose gradients are not finite.
    pub nonfinite: NonFinite,
    velocity: HashMap<String, Tensor>,
}

impl Sgd {
    /// Plain descent.
    pub fn new(lr: f64) -> Sgd {
        Sgd { lr, momentum: 0.0, weight_decay: 0.0, nonfinite: NonFinite::Continue, velocity: HashMap::new() }
    }

    /// With another answer to gradients that are not finite.
    pub fn nonfinite(mut self, nonfinite: NonFinite) -> Sgd {
        self.nonfinite = nonfinite;
        self
    }

    /// With momentum.
    pub fn momentum(mut self, momentum: f64) -> Sgd {
        self.momentum = momentum;
        self
    }

    /// With weight decay.
    pub fn weight_decay(mut self, weight_decay: f64) -> Sgd {
        self.weight_decay = weight_decay;
        self
    }
}

impl Optimizer for Sgd {
    fn nonfinite(&self) -> NonFinite {
        self.nonfinite
    }

    fn update(&mut self, path: &str, parameter: &Tensor, gradient: &Tensor, step: &Step) -> Tensor {
        let mut direction = gradient.clone();
        if self.weight_decay != 0.0 {
            direction = direction + parameter * self.weight_decay;
        }
        if self.momentum != 0.0 {
            let velocity = self.velocity.remove(path);
            if let Some(velocity) = &velocity {
                direction = velocity * self.momentum + direction;
            }
            let before = velocity.unwrap_or_else(|| direction.zeros_like());
            self.velocity.insert(path.to_string(), step.commit(direction.clone(), &before));
        }
        parameter - direction * self.lr
    }

    fn state(&self) -> Vec<(String, Tensor)> {
        sorted(self.velocity.iter().map(|(path, v)| (format!("velocity.{path}"), v.clone())))
    }

    fn restore(&mut self, _: u64, state: Vec<(String, Tensor)>) {
        self.velocity.clear();
        for (name, tensor) in state {
            if let Some(path) = name.strip_prefix("velocity.") {
                self.velocity.insert(path.into(), tensor);
            }
        }
    }
}

fn sorted(state: impl Iterator<Item = (String, Tensor)>) -> Vec<(String, Tensor)> {
    let mut state: Vec<_> = state.collect();
    state.sort_by(|a, b| a.0.cmp(&b.0));
    state
}

/// Adam, with decoupled weight decay.
#[doc(alias("AdamW"))]
pub struct Adam {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the running mean and of the running mean square.
    pub betas: (f64, f64),
    /// Added to the root.
    pub eps: f64,
    /// The share of a parameter that each step takes away, times the learning rate.
    pub weight_decay: f64,
    /// What becomes of steps whose gradients are not finite.
    pub nonfinite: NonFinite,
    /// Steps that were taken before the powers below began.
    steps: u64,
    /// The betas to the power of the steps that were applied, which devices count; by device.
    powers: Vec<(Device, Powers)>,
    moments: HashMap<String, (Tensor, Tensor)>,
}

/// A power of each beta, and what they correct the moments by in the step at hand, in the dtypes asked for.
struct Powers {
    mean: Tensor,
    square: Tensor,
    corrections: [Tensor; 2],
    rounded: Vec<(DType, [Tensor; 2])>,
}

impl Adam {
    /// Adam with the usual constants.
    pub fn new(lr: f64) -> Adam {
        Adam {
            lr,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.0,
            nonfinite: NonFinite::Continue,
            steps: 0,
            powers: Vec::new(),
            moments: HashMap::new(),
        }
    }

    /// With another answer to gradients that are not finite.
    pub fn nonfinite(mut self, nonfinite: NonFinite) -> Adam {
        self.nonfinite = nonfinite;
        self
    }

    /// What the moments on a device are divided by in the step at hand.
    fn corrections(&mut self, device: &Device, dtype: DType) -> [Tensor; 2] {
        let Some((_, powers)) = self.powers.iter_mut().find(|(d, _)| d == device) else {
            unreachable!("a step begins with the devices that take part")
        };
        if let Some((_, rounded)) = powers.rounded.iter().find(|(d, _)| *d == dtype) {
            return rounded.clone();
        }
        let rounded = powers.corrections.each_ref().map(|c| c.to_dtype(dtype));
        powers.rounded.push((dtype, rounded.clone()));
        rounded
    }

    /// With decoupled weight decay.
    pub fn weight_decay(mut self, weight_decay: f64) -> Adam {
        self.weight_decay = weight_decay;
        self
    }
}

impl Optimizer for Adam {
    fn begin(&mut self, step: &Step) {
        let (b1, b2) = self.betas;
        let known = self.powers.first().map(|(_, powers)| (powers.mean.clone(), powers.square.clone()));
        for device in step.devices() {
            let at = self.powers.iter().position(|(d, _)| d == device);
            let own = at.map(|at| self.powers.swap_remove(at).1);
            let moved = || {
                let (mean, square) = known.as_ref()?;
                Some((mean.to_device(device).ok()?, square.to_device(device).ok()?))
            };
            let powers = own.map(|own| (own.mean, own.square)).or_else(moved);
            let (mean, square) = powers.unwrap_or_else(|| {
                // The same products as those below.
                let power = |b: f64| (0..self.steps).fold(1.0, |power, _| power * b);
                (Tensor::scalar(power(b1), device), Tensor::scalar(power(b2), device))
            });
            let new = [&mean * b1, &square * b2];
            let corrections = new.each_ref().map(|power| 1.0 - power);
            let [m, s] = new;
            let (mean, square) = (step.commit(m, &mean), step.commit(s, &square));
            self.powers.push((device.clone(), Powers { mean, square, corrections, rounded: Vec::new() }));
        }
    }

    fn nonfinite(&self) -> NonFinite {
        self.nonfinite
    }

    fn update(&mut self, path: &str, parameter: &Tensor, gradient: &Tensor, step: &Step) -> Tensor {
        let (b1, b2) = self.betas;
        let moments = self.moments.remove(path);
        let (mean, square) = match &moments {
            Some((mean, square)) => {
                (mean * b1 + gradient * (1.0 - b1), square * b2 + gradient.square() * (1.0 - b2))
            }
            None => (gradient * (1.0 - b1), gradient.square() * (1.0 - b2)),
        };
        let [c1, c2] = self.corrections(&parameter.device(), mean.dtype());
        let change = &mean / c1 / ((&square / c2).sqrt() + self.eps) * self.lr;
        let before = moments.unwrap_or_else(|| (mean.zeros_like(), square.zeros_like()));
        let kept = (step.commit(mean, &before.0), step.commit(square, &before.1));
        self.moments.insert(path.to_string(), kept);
        let kept = if self.weight_decay == 0.0 {
            parameter.clone()
        } else {
            parameter * (1.0 - self.lr * self.weight_decay)
        };
        kept - change
    }

    fn state(&self) -> Vec<(String, Tensor)> {
        let moments = self.moments.iter().flat_map(|(path, (mean, square))| {
            [(format!("mean.{path}"), mean.clone()), (format!("square.{path}"), square.clone())]
        });
        // The same on all devices.
        let powers = self.powers.first().into_iter().flat_map(|(_, powers)| {
            [("power.mean".into(), powers.mean.clone()), ("power.square".into(), powers.square.clone())]
        });
        sorted(moments.chain(powers))
    }

    fn restore(&mut self, steps: u64, state: Vec<(String, Tensor)>) {
        self.steps = steps;
        self.powers.clear();
        let (mut means, mut squares, mut powers) = (HashMap::new(), HashMap::new(), HashMap::new());
        for (name, tensor) in state {
            if let Some(path) = name.strip_prefix("mean.") {
                means.insert(path.to_string(), tensor);
            } else if let Some(path) = name.strip_prefix("square.") {
                squares.insert(path.to_string(), tensor);
            } else if let Some(of) = name.strip_prefix("power.") {
                powers.insert(of.to_string(), tensor);
            }
        }
        // Some steps may have been refused: only the devices know.
        if let (Some(mean), Some(square)) = (powers.remove("mean"), powers.remove("square")) {
            let corrections = [mean.clone(), square.clone()];
            self.powers.push((mean.device(), Powers { mean, square, corrections, rounded: Vec::new() }));
        }
        let pair = |(path, mean)| squares.remove(&path).map(|square| (path, (mean, square)));
        self.moments = means.into_iter().filter_map(pair).collect();
    }
}
