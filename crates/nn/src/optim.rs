//! Optimisers. A step replaces each parameter that has a gradient by a new leaf; state is kept by path.

use crate::Module;
use kiln_tensor::{Gradients, Tensor, no_grad};
use std::collections::HashMap;

/// Something that improves a model by its gradients.
pub trait Optimizer {
    /// The parameter at `path` after a step along `gradient`.
    fn update(&mut self, path: &str, parameter: &Tensor, gradient: &Tensor) -> Tensor;

    /// Called once before the parameters of a step are updated.
    fn begin(&mut self) {}

    /// What it has learnt so far besides the parameters, by name: enough to go on from.
    fn state(&self) -> Vec<(String, Tensor)>;

    /// Goes on from what [`Optimizer::state`] gave after `steps` steps.
    fn restore(&mut self, steps: u64, state: Vec<(String, Tensor)>);

    /// Updates every parameter of `model` that has a gradient, and ends the step for its device.
    fn step(&mut self, model: &mut dyn Module, gradients: &Gradients) {
        self.step_by(model, &mut |_, parameter| gradients.get(parameter).cloned());
    }

    /// Like [`Optimizer::step`], with the gradients of all parameters in the model's order.
    fn step_with(&mut self, model: &mut dyn Module, gradients: &[Tensor]) {
        self.step_by(model, &mut |i, _| gradients.get(i).cloned());
    }

    /// Updates every parameter for which `gradient` gives one; it is asked with the parameter's place in the model.
    fn step_by(
        &mut self,
        model: &mut dyn Module,
        gradient: &mut dyn FnMut(usize, &Tensor) -> Option<Tensor>,
    ) {
        self.begin();
        let mut devices = Vec::new();
        let mut place = 0;
        no_grad(|| {
            model.visit_mut("", &mut |path, parameter| {
                place += 1;
                if let Some(gradient) = gradient(place - 1, parameter) {
                    let device = parameter.device();
                    *parameter = self.update(path, &parameter.detach(), &gradient).requires_grad();
                    if !devices.contains(&device) {
                        devices.push(device);
                    }
                }
            });
        });
        devices.iter().for_each(|device| device.mark());
    }
}

/// Stochastic gradient descent, with momentum and weight decay.
pub struct Sgd {
    /// Learning rate.
    pub rate: f64,
    /// How much of the last velocity stays; 0 for none.
    pub momentum: f64,
    /// Added to the gradient: this times the parameter.
    pub decay: f64,
    velocity: HashMap<String, Tensor>,
}

impl Sgd {
    /// Plain descent.
    pub fn new(rate: f64) -> Sgd {
        Sgd { rate, momentum: 0.0, decay: 0.0, velocity: HashMap::new() }
    }

    /// With momentum.
    pub fn momentum(mut self, momentum: f64) -> Sgd {
        self.momentum = momentum;
        self
    }

    /// With weight decay.
    pub fn decay(mut self, decay: f64) -> Sgd {
        self.decay = decay;
        self
    }
}

impl Optimizer for Sgd {
    fn update(&mut self, path: &str, parameter: &Tensor, gradient: &Tensor) -> Tensor {
        let mut direction = gradient.clone();
        if self.decay != 0.0 {
            direction = direction + parameter * self.decay;
        }
        if self.momentum != 0.0 {
            if let Some(velocity) = self.velocity.get(path) {
                direction = velocity * self.momentum + direction;
            }
            self.velocity.insert(path.to_string(), direction.clone());
        }
        parameter - direction * self.rate
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
pub struct Adam {
    /// Learning rate.
    pub rate: f64,
    /// Decay of the running mean and of the running mean square.
    pub betas: (f64, f64),
    /// Added to the root.
    pub eps: f64,
    /// The share of a parameter that each step takes away, times the rate.
    pub decay: f64,
    steps: i32,
    moments: HashMap<String, (Tensor, Tensor)>,
}

impl Adam {
    /// Adam with the usual constants.
    pub fn new(rate: f64) -> Adam {
        Adam { rate, betas: (0.9, 0.999), eps: 1e-8, decay: 0.0, steps: 0, moments: HashMap::new() }
    }

    /// With decoupled weight decay.
    pub fn decay(mut self, decay: f64) -> Adam {
        self.decay = decay;
        self
    }
}

impl Optimizer for Adam {
    fn begin(&mut self) {
        self.steps += 1;
    }

    fn update(&mut self, path: &str, parameter: &Tensor, gradient: &Tensor) -> Tensor {
        let (b1, b2) = self.betas;
        let (mean, square) = match self.moments.remove(path) {
            Some((mean, square)) => {
                (mean * b1 + gradient * (1.0 - b1), square * b2 + gradient.square() * (1.0 - b2))
            }
            None => (gradient * (1.0 - b1), gradient.square() * (1.0 - b2)),
        };
        let (c1, c2) = (1.0 - b1.powi(self.steps), 1.0 - b2.powi(self.steps));
        let change = &mean / c1 / ((&square / c2).sqrt() + self.eps) * self.rate;
        self.moments.insert(path.to_string(), (mean, square));
        let kept =
            if self.decay == 0.0 { parameter.clone() } else { parameter * (1.0 - self.rate * self.decay) };
        kept - change
    }

    fn state(&self) -> Vec<(String, Tensor)> {
        sorted(self.moments.iter().flat_map(|(path, (mean, square))| {
            [(format!("mean.{path}"), mean.clone()), (format!("square.{path}"), square.clone())]
        }))
    }

    fn restore(&mut self, steps: u64, state: Vec<(String, Tensor)>) {
        self.steps = steps as i32;
        let mut means = HashMap::new();
        let mut squares = HashMap::new();
        for (name, tensor) in state {
            if let Some(path) = name.strip_prefix("mean.") {
                means.insert(path.to_string(), tensor);
            } else if let Some(path) = name.strip_prefix("square.") {
                squares.insert(path.to_string(), tensor);
            }
        }
        let pair = |(path, mean)| squares.remove(&path).map(|square| (path, (mean, square)));
        self.moments = means.into_iter().filter_map(pair).collect();
    }
}
